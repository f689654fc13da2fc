"""What is sent to vLLM and SGLang, and what is read in their replies and counters."""

import json
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from dflash_offline import UserError
from dflash_offline.train.serve_check.engine import Serving, find_engine
from dflash_offline.train.serve_check.profile import Profile
from dflash_offline.train.serve_check.server import Server
from dflash_offline.train.serve_check.sglang import Sglang
from dflash_offline.train.serve_check.vllm import Vllm, read_counters, since

# A page of vLLM 0.32.0, cut to these counters: two prompts, blocks of 4.
METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="served"} 56.0
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="served"} 1.796038588980427e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="served"} 168.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="served"} 36.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="served",position="0"} 18.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="served",position="2"} 6.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="served",position="1"} 12.0
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",model_name="served",position="0"} 1.7e+09
python_gc_objects_collected_total{generation="0"} 15210.0
"""


def serving(**changes: Any) -> Serving:
    values: dict[str, Any] = {
        "target": "/models/target",
        "folder": Path("/models/drafter"),
        "layout": "zlab",
        "block_size": 8,
        "dtype": "float32",
        "device_type": "cpu",
        "max_tokens": 300,
        "port": 1234,
    }
    return Serving(**values | changes)


class Recorder:
    """A server in a thread: `reply(path, body)` gives each reply's JSON or text; requests are kept."""

    def __init__(self, log_path: Path) -> None:
        self.reply: Callable[[str, Any], Any] = lambda path, body: {}
        self.asked: list[tuple[str, Any]] = []
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            def send(self, body: Any) -> None:
                recorder.asked.append((self.path, body))
                reply = recorder.reply(self.path, body)
                self.send_response(200)
                self.end_headers()
                self.wfile.write(reply.encode() if isinstance(reply, str) else json.dumps(reply).encode())

            def do_GET(self) -> None:
                self.send(None)

            def do_POST(self) -> None:
                self.send(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def log_message(self, format: str, *args: Any) -> None: ...

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        self.server = Server([], {}, self.http.server_port, log_path, 120.0)
        self.thread = threading.Thread(target=self.http.serve_forever)


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    made = Recorder(tmp_path / "log")
    made.thread.start()
    yield made
    made.http.shutdown()
    made.thread.join()
    made.http.server_close()


def test_counters_of_vllm_are_read_by_position() -> None:
    assert read_counters(METRICS) == Profile(56, (18, 12, 6))
    assert read_counters("# nothing yet\n") == Profile(0, ())


def test_counters_of_several_engines_are_summed() -> None:
    assert read_counters(METRICS + METRICS.replace('engine="0"', 'engine="1"')) == Profile(112, (36, 24, 12))


def test_only_what_was_counted_since_is_measured() -> None:
    assert since(Profile(0, ()), Profile(56, (18, 12, 6)), 3) == Profile(56, (18, 12, 6))
    assert since(Profile(6, (8, 2, 1)), Profile(56, (18, 12, 6)), 3) == Profile(50, (10, 10, 5))
    with pytest.raises(UserError, match="counts 3 positions .* blocks of 7 drafts"):
        since(Profile(0, ()), Profile(56, (18, 12, 6)), 7)


def test_vllm_is_started_with_both_folders_or_with_one() -> None:
    command = Vllm().command("python", serving(extra=("--seed", "3")))
    drafter = json.loads(command[command.index("--speculative-config") + 1])
    assert drafter == {"method": "dflash", "model": "/models/drafter", "num_speculative_tokens": 7}
    assert command[command.index("--model") + 1] == "/models/target"
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert command[command.index("--port") + 1] == "1234"
    assert command[-3:] == ["--enforce-eager", "--seed", "3"]
    one = Vllm().command("python", serving(layout="speculators", device_type="cuda"))
    assert one[one.index("--model") + 1] == "/models/drafter"
    assert "--speculative-config" not in one
    assert "--enforce-eager" not in one


def test_vllm_is_asked_with_token_ids_and_its_counters_are_read(recorder: Recorder) -> None:
    pages = iter([METRICS.replace("56.0", "6.0").replace("18.0", "8.0"), METRICS, METRICS])

    def reply(path: str, body: Any) -> Any:
        return next(pages) if path == "/metrics" else {"choices": [{"token_ids": [5, 6]}]}

    recorder.reply, engine = reply, Vllm()
    engine.begin(recorder.server)
    assert engine.answer(recorder.server, [1, 2, 3], 9) == [5, 6]
    assert engine.profile(recorder.server, 3) == Profile(50, (10, 0, 0))
    path, body = recorder.asked[1]
    assert path == "/v1/completions"
    assert body["prompt"] == [1, 2, 3]
    assert body["max_tokens"] == 9
    assert body["temperature"] == 0
    assert body["return_token_ids"] is True


def test_vllm_renders_chats_and_texts(recorder: Recorder) -> None:
    recorder.reply = lambda path, body: {"tokens": [4, 5]}
    chat = {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"enable_thinking": False}}
    assert Vllm().chat_ids(recorder.server, chat) == [4, 5]
    assert Vllm().text_ids(recorder.server, "hi") == [4, 5]
    assert recorder.asked[0] == ("/tokenize", {"model": "served", **chat, "add_generation_prompt": True})
    assert recorder.asked[1] == ("/tokenize", {"model": "served", "prompt": "hi", "add_special_tokens": False})


def test_a_reply_of_another_shape_is_named(recorder: Recorder) -> None:
    recorder.reply = lambda path, body: {"choices": [{"text": "hello"}]}
    with pytest.raises(UserError, match="a reply without token_ids"):
        Vllm().answer(recorder.server, [1], 2)
    with pytest.raises(UserError, match="a reply without tokens"):
        Vllm().text_ids(recorder.server, "hi")
    with pytest.raises(UserError, match="a reply without output_ids or meta_info"):
        Sglang().answer(recorder.server, [1], 2)


@pytest.mark.parametrize("name", ["spec_accept_histogram", "spec_correct_drafts_histogram"])
def test_sglang_gives_a_histogram_with_each_answer(name: str, recorder: Recorder) -> None:
    histograms = iter([[1, 2], [0, 1, 0, 2]])
    recorder.reply = lambda path, body: {"output_ids": [7, 8], "meta_info": {name: next(histograms)}}
    engine = Sglang()
    engine.begin(recorder.server)
    assert [engine.answer(recorder.server, [1, 2], 9) for _ in range(2)] == [[7, 8], [7, 8]]
    assert engine.profile(recorder.server, 3) == Profile(6, (5, 2, 2))
    path, body = recorder.asked[0]
    assert path == "/generate"
    assert body == {"input_ids": [1, 2], "sampling_params": {"temperature": 0, "max_new_tokens": 9}}
    assert engine.chat_ids(recorder.server, {"messages": []}) is None


def test_sglang_is_started_with_both_folders() -> None:
    command = Sglang().command("python", serving())
    assert command[command.index("--model-path") + 1] == "/models/target"
    assert command[command.index("--speculative-draft-model-path") + 1] == "/models/drafter"
    assert command[command.index("--speculative-algorithm") + 1] == "DFLASH"


def test_an_engine_is_looked_for_in_the_interpreter(stand_in: None, tmp_path: Path) -> None:
    found = find_engine(sys.executable, "auto", (Sglang(), Vllm()))
    assert isinstance(found.engine, Vllm)
    assert found.package == "vllm (of no package)"
    with pytest.raises(UserError, match="has no sglang"):
        find_engine(sys.executable, "sglang", (Sglang(), Vllm()))
    with pytest.raises(UserError, match="cannot be run"):
        find_engine(str(tmp_path / "python"), "auto", (Vllm(),))
    with pytest.raises(UserError, match="ended with exit code 1"):
        find_engine("/bin/false", "auto", (Vllm(),))
