"""bfloat16 for zarr-python, so that `zarr.open` reads a store: a plug-in, not used by our own code.

The type is registered in zarr-extensions (data-types/bfloat16), but zarr-python 3.1 to 3.4 has
none of its own (zarr-python issues 711 and 2656); delete this file when it has. Installed packages
are found through the entry point `zarr.data_type`; elsewhere call `register`.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import ml_dtypes
import numpy as np
from zarr.dtype import DataTypeValidationError, ZDType, data_type_registry

NATIVE = np.dtype(ml_dtypes.bfloat16)
SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True, kw_only=True, slots=True)
class BFloat16(ZDType[Any, Any]):
    """Zarr v3 data type `bfloat16`, seen as numpy arrays of `ml_dtypes.bfloat16`."""

    dtype_cls: ClassVar[type] = type(NATIVE)
    _zarr_v3_name: ClassVar[str] = "bfloat16"

    @property
    def item_size(self) -> int:
        """Bytes of one value."""
        return NATIVE.itemsize

    @classmethod
    def from_native_dtype(cls, dtype: Any) -> Self:
        if dtype != NATIVE:
            raise DataTypeValidationError(f"{dtype} is not bfloat16")
        return cls()

    def to_native_dtype(self) -> Any:
        return NATIVE

    @classmethod
    def _from_json_v2(cls, data: Any) -> Self:
        raise DataTypeValidationError("bfloat16 exists in Zarr v3 only")

    @classmethod
    def _from_json_v3(cls, data: Any) -> Self:
        if data != cls._zarr_v3_name and data != {"name": cls._zarr_v3_name}:
            raise DataTypeValidationError(f"{data!r} is not bfloat16")
        return cls()

    def to_json(self, zarr_format: int) -> Any:
        if zarr_format != 3:
            raise ValueError("bfloat16 exists in Zarr v3 only")
        return self._zarr_v3_name

    def _check_scalar(self, data: object) -> bool:
        return isinstance(data, (int, float, np.number, ml_dtypes.bfloat16))

    def cast_scalar(self, data: Any) -> Any:
        if not self._check_scalar(data):
            raise TypeError(f"{data!r} is not a number")
        return ml_dtypes.bfloat16(data)

    def default_scalar(self) -> Any:
        return ml_dtypes.bfloat16(0)

    def from_json_scalar(self, data: Any, *, zarr_format: int) -> Any:
        return ml_dtypes.bfloat16(SPECIAL[data] if isinstance(data, str) else data)

    def to_json_scalar(self, data: Any, *, zarr_format: int) -> Any:
        value = float(data)
        names = {math.inf: "Infinity", -math.inf: "-Infinity"}
        return "NaN" if math.isnan(value) else names.get(value, value)


def register() -> None:
    """Tells zarr-python about the type, where the package is used without being installed."""
    data_type_registry.register("bfloat16", BFloat16)
