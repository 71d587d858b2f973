"""Compile Triton kernels for a named GPU architecture on a machine that needs no GPU, and read what the compiler used.

The test session may run Triton's interpreter, which rewrites kernels when they are decorated; compiling therefore
happens in one long-lived child process without it. A request names the kernel by module and attribute:

    report = compile_kernel(
        "segue_kernels.silu_mul", "silu_mul_kernel", arch=90,
        signature={"x_ptr": "*bf16", "rows": "i32"},        # every other parameter is a constexpr
        constexprs={"BLOCK": 1024, "OUT": "tl.bfloat16"},   # strings that start with "tl." name a Triton dtype
        divisible_by_16=("x_ptr",), num_warps=4, num_stages=3,
    )
    assert report.spill_bytes == 0
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHS = (80, 90, 100)


@dataclass(frozen=True)
class CompileReport:
    """Resources of one compiled kernel; `spill_bytes` is the local-memory frame per thread (0: nothing spilled)."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    ptx: str

    def uses(self, instruction: str) -> bool:
        """Whether the PTX contains the text `instruction`, such as "wgmma" or "griddepcontrol.wait"."""
        return instruction in self.ptx


def compile_kernel(
    module: str,
    kernel: str,
    *,
    arch: int,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any] | None = None,
    divisible_by_16: Sequence[str] = (),
    num_warps: int = 4,
    num_stages: int = 3,
    options: Mapping[str, Any] | None = None,
) -> CompileReport:
    """Compile `module.kernel` for compute capability `arch` (80, 90, 100); RuntimeError holds the compiler's words."""
    request = {
        "module": module,
        "kernel": kernel,
        "arch": arch,
        "signature": dict(signature),
        "constexprs": dict(constexprs or {}),
        "divisible_by_16": list(divisible_by_16),
        "options": {"num_warps": num_warps, "num_stages": num_stages, **(options or {})},
    }
    worker = _worker()
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.write(json.dumps(request) + "\n")
    worker.stdin.flush()
    line = worker.stdout.readline()
    if not line:
        raise RuntimeError(f"the compiling process ended with code {worker.wait()}")
    answer = json.loads(line)
    if "error" in answer:
        raise RuntimeError(f"{kernel} for sm_{arch}: {answer['error']}")
    return CompileReport(**answer)


@functools.cache
def _worker() -> subprocess.Popen[str]:
    root = Path(__file__).resolve().parents[2]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(root / "kernels"), str(root), env.get("PYTHONPATH", "")])
    worker = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )
    atexit.register(_stop, worker)
    return worker


def _stop(worker: subprocess.Popen[str]) -> None:
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.close()
    worker.stdout.close()
    worker.wait(timeout=30)


def _compile(request: dict[str, Any]) -> dict[str, Any]:
    import importlib

    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    function = getattr(importlib.import_module(request["module"]), request["kernel"])
    constexprs = {
        name: getattr(tl, value[3:]) if isinstance(value, str) and value.startswith("tl.") else value
        for name, value in request["constexprs"].items()
    }
    signature = {name: request["signature"].get(name, "constexpr") for name in function.arg_names}
    missing = [name for name, kind in signature.items() if kind == "constexpr" and name not in constexprs]
    unknown = (request["signature"].keys() | constexprs.keys()) - set(function.arg_names)
    if missing or unknown:
        raise ValueError(f"parameters without a type or value: {missing}; not parameters: {sorted(unknown)}")
    attributes = {(function.arg_names.index(name),): [["tt.divisibility", 16]] for name in request["divisible_by_16"]}
    kind = GluonASTSource if isinstance(function, GluonJITFunction) else triton.compiler.ASTSource
    source = kind(function, signature, constexprs, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", request["arch"], 32), options=request["options"])
    registers, spill_bytes = _resources(compiled.asm["cubin"])
    return {
        "registers": registers,
        "spill_bytes": spill_bytes,
        "shared_bytes": compiled.metadata.shared,
        "ptx": compiled.asm["ptx"],
    }


def _resources(cubin: bytes) -> tuple[int, int]:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    if usage is None:
        raise RuntimeError(f"no resource usage in {text!r}")
    registers, stack, local = map(int, usage.groups())
    return registers, stack + local


def _serve() -> None:
    """Answer one JSON line for each JSON line; stray prints of the compiler go to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            answer = _compile(json.loads(line))
        except Exception as error:  # reported to the test that asked, which fails with it
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve()
