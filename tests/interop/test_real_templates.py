"""Our golden samples are those of the real chat templates, and our mask is that of the real generation tags.

The templates come from two packages, in an environment made by this test: `trl` 1.16.0 ships those of Qwen3, Qwen3.5,
Llama 3.1, Gemma 3, gpt-oss, GLM-4.5 and DeepSeek-R1 as files, and "training" variants of many more with generation
tags; `mistral-common` 1.13.1 writes Mistral's from its own rules, and renders chats itself without any template.
Tokenizers are ours (one id per byte): what is compared is text.
"""

import importlib.util
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from dflash_offline.extract.chats.chat import ChatRenderer
from dflash_offline.extract.lines.inputs import LeftOut
from dflash_offline.extract.lines.shapes import Chat
from environments import make_environment

pytestmark = pytest.mark.slow
OURS = Path(__file__).parents[1] / "extract" / "chats" / "templates"
HARMLESS = re.compile(
    r"(<think>|</think>|<\|start\|>|assistant|to=(self|user)|<\|message\|>|<.Assistant.>|<.tool.outputs.end.>)*"
)
"""What tags may cover before an answer and we do not train on: headers and empty thoughts."""
END_MARKS = r"(<\|eom\|>|<\|eot\|>|<\|END_OF_TURN_TOKEN\|>|<\|end\|>)\Z"
"""Of families that we make no tokenizer for: there they are several tokens."""
QUESTION = "1+2?"
"""The first question of chats with tools; what stands before it, our templates tell in fewer words."""

REAL = {
    "qwen3": "qwen3",
    "qwen3_5": "qwen3_5_think",
    "llama3_1": "llama3_1",
    "gemma3": "gemma3",
    "gptoss": "gptoss",
    "glm4_5": "glm4moe",
    "deepseek_r1": "deepseekv3",  # by its prompt, which opens a thought, the file is R1's
    "mistral_v3": "mistral_v3",
}
TRAINING = {
    "qwen3": "qwen2_5 qwen3 qwen3_5_think qwen3_5_nothink qwen3_6 qwen3_8 qwen3_instruct_2507 qwen3_vl nemotron_3_nano "
    "nemotron_3_super nemotron_3_ultra nemotron_3_5_lightning lfm2 lfm2_v2 cohere cohere2 phi3 phi3_5 muse_glimmer",
    "llama3_1": "llama3",
    "gemma3": "gemma gemma3",
    "gptoss": "gptoss",
    "glm4_5": "glm4moe",
    "deepseek_r1": "deepseekv3 deepseek_r1_distill",
}
TAGGED = [(family, name) for family, names in TRAINING.items() for name in names.split()]

MISTRAL = """
import json, sys
from mistral_common.integrations.chat_templates.chat_templates import generate_chat_template
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.base import TokenizerVersion
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
off = dict.fromkeys(["image_support", "audio_support", "thinking_support", "plain_thinking_support"], False)
none = dict.fromkeys(["default_system_prompt", "model_settings_fields", "reasoning_effort_values"])
template = generate_chat_template(
    spm=True, tokenizer_version=TokenizerVersion.v3, use_special_token_variables=False, reasoning_effort_default=None,
    **off, **none
)
tokenizer, texts = MistralTokenizer.v3(), []
for chat in json.load(sys.stdin):
    texts.append(tokenizer.encode_chat_completion(ChatCompletionRequest.from_openai(**chat)).text)
print(json.dumps([template, texts]))
"""


@pytest.fixture(scope="module")
def families() -> ModuleType:
    spec = importlib.util.spec_from_file_location("families", OURS / "families.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with mistral-common, and beside it the wheel of trl."""
    folder = tmp_path_factory.mktemp("templates")
    python = make_environment(folder, ["mistral-common==1.13.1", "sentencepiece"])
    download = [str(python), "-m", "pip", "-q", "--disable-pip-version-check", "download", "--no-deps"]
    subprocess.run([*download, "-d", str(folder), "trl==1.16.0"], check=True, stdout=sys.stderr)
    return python


@pytest.fixture(scope="module")
def mistral(python: Path, families: ModuleType) -> tuple[str, list[str]]:
    """Mistral's own template, and Mistral's own text of every beginning that is a prompt."""
    asked = [prompt_request(chat, turn) for chat, turn in mistral_prompts(families)]
    done = subprocess.run(
        [str(python), "-c", MISTRAL], input=json.dumps(asked), capture_output=True, text=True, check=True
    )
    template, texts = json.loads(done.stdout)
    return template, texts


@pytest.fixture(scope="module")
def templates(python: Path, mistral: tuple[str, list[str]]) -> dict[str, str]:
    (wheel,) = python.parents[1].glob("trl-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith("trl/chat_templates/")]
        found = {Path(name).stem: archive.read(name).decode() for name in names if name.endswith(".jinja")}
    return found | {"mistral_v3": mistral[0]}


def mistral_prompts(families: ModuleType) -> list[tuple[Chat, int]]:
    return [
        (chat, turn)
        for chat in families.CHATS.values()
        for turn, message in enumerate(chat.messages)
        if message["role"] == "assistant"
    ]


def prompt_request(chat: Chat, turn: int) -> dict[str, Any]:
    """What mistral-common takes: OpenAI's format, arguments as text."""
    messages = []
    for message in chat.messages[:turn]:
        kept = {key: message[key] for key in ("role", "content", "tool_call_id") if key in message}
        if message.get("tool_calls"):
            function = message["tool_calls"][0]["function"]
            call = message["tool_calls"][0] | {"function": function | {"arguments": json.dumps(function["arguments"])}}
            kept = {"role": "assistant", "tool_calls": [call]}
        messages.append(kept)
    return {"messages": messages, "tools": chat.tools}


def golden(family: str) -> dict[str, str]:
    blocks = (OURS / f"{family}.txt").read_text(encoding="utf-8").split("== ")[1:]
    return {name: body.rstrip("\n") for name, _, body in (block.partition("\n") for block in blocks)}


def since_question(outcome: str) -> list[str]:
    """Each sample from its first question on, where the chat has tools."""
    return [part.rpartition(QUESTION)[2] for part in outcome.rstrip("\n").split("----\n")]


@pytest.mark.parametrize("family", REAL)
def test_golden_samples_of_the_real_template(families: Any, templates: dict[str, str], family: str) -> None:
    for name, expected in golden(family).items():
        options = {"enable_thinking": False} if name.endswith(", without thinking") else {}
        chat = families.CHATS[name.partition(", without")[0]]
        side = families.side_of(family, templates[REAL[family]])
        found = families.outcome(ChatRenderer(side, options, now=families.TODAY), chat)
        if chat.tools:
            assert since_question(found) == since_question(expected), name
        else:
            assert found.rstrip("\n") == expected, name


def test_mistral_prompts_without_a_template(families: Any, mistral: tuple[str, list[str]]) -> None:
    """mistral-common writes a space as the mark of its SentencePiece tokenizer."""
    texts = mistral[1]
    renderer = ChatRenderer(families.side_of("mistral_v3", families.our_template("mistral_v3")), {})
    for (chat, turn), expected in zip(mistral_prompts(families), texts, strict=True):
        prompt = renderer.question(Chat(chat.messages[:turn], chat.tools))
        ours = renderer.encoder.decode(prompt)
        theirs = expected.replace("\u2581", " ").replace("<0x0A>", "\n")
        if chat.tools:
            ours, theirs = ours.partition("[INST]")[2], theirs.partition("[INST]")[2]
        assert ours == theirs


@pytest.mark.parametrize(("family", "name"), TAGGED, ids=[name for _, name in TAGGED])
def test_mask_against_generation_tags(families: Any, templates: dict[str, str], family: str, name: str) -> None:
    """By transformers' own mask of these tags: the message's words are in both, and ours adds only what closes them."""
    side = families.side_of(family, templates[f"{name}_training"].replace('strftime_now("%Y-%m-%d")', "'today'"))
    renderer = ChatRenderer(side, {}, "each")
    num_compared = 0
    for chat in families.CHATS.values():
        samples, reasons = rendered(renderer, chat)
        assert not {"generation marks disagree", "not marked by the template"} & reasons
        num_compared += sum(compare(side, chat, sample) for sample in samples)
    assert num_compared >= 1


def rendered(renderer: ChatRenderer, chat: Chat) -> tuple[list[Any], set[str]]:
    try:
        found = renderer.render(chat)
    except LeftOut as fault:
        return [], {fault.reason}
    return found.samples, set(found.left_out)


def compare(side: Any, chat: Chat, sample: Any) -> bool:
    """True where the sample is a rendered beginning of the chat (else its answer is the message's own words)."""
    for count in range(2, len(chat.messages) + 1):
        try:
            found = side.tokenizer.apply_chat_template(
                chat.messages[:count], tools=chat.tools, return_assistant_tokens_mask=True
            )
        except Exception:  # of a template that this beginning does not suit
            continue
        ids, marked = found["input_ids"], found["assistant_masks"]
        tail = set(ids[len(sample.ids) :])
        if chat.messages[count - 1]["role"] != "assistant" or ids[: len(sample.ids)] != sample.ids or len(tail) > 2:
            continue
        turn = max((i for i in range(len(sample.ids)) if not sample.mask[i]), default=0)
        while turn > 0 and marked[turn]:  # tags may open with the header, and before an empty thought
            turn -= 1
        theirs = text_of(side, [token for token, on in zip(sample.ids[turn:], marked[turn:]) if on])
        ours = text_of(side, [token for token, on in zip(sample.ids, sample.mask) if on])
        assert theirs.endswith(ours)
        assert HARMLESS.fullmatch(theirs.removesuffix(ours))
        return True
    return False


def text_of(side: Any, ids: list[int]) -> str:
    """Without blanks and without the mark that ends the turn."""
    text = "".join(side.tokenizer.decode(ids[:-1] if ids[-1] in side.special_ids else ids).split())
    return re.sub(END_MARKS, "", text)
