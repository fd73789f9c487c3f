"""The command line of `train.py`: parsing, checks, and the options a checkpoint must share."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import NoReturn

from checkpoint import exists, read_run, verify
from gpt import SIZES
from moe import NUM_EXPERTS
from text import Text, load_text, require_bytes
from usage import UsageError

MODELS = ("gpt", "moe")
DTYPES = ("float32", "bfloat16")
OPTIMIZERS = ("adamw", "muon")
CODES = ("int8", "float8_e4m3fn")
INDUCTOR_BACKENDS = ("inductor", "compiled_fsdp")
BACKENDS = (*INDUCTOR_BACKENDS, "compiled_fsdp_eager", "eager")
DEFAULT_MINUTES = 5.0
COMPARE_MINUTES = 12.0
# What --resume does not have to share with the checkpoint: where to stop, not what to compute.
FREE = (
    "minutes",
    "stop_after",
    "save_every",
    "world",
    "compare",
    "resume",
    "report",
    "whole_step",
    "out",
    "text",
)


@dataclass(frozen=True, slots=True)
class Options:
    """All options; `steps` is None where the time budget is to set the number of steps.

    `streams` is the number of ranks that the run was started with; a resumed one may have another
    `world`.
    """

    model: str
    size: str
    steps: int | None
    minutes: float | None
    stop_after: int | None
    save_every: int | None
    batch: int
    length: int
    optimizer: str
    lr: float
    clip: float
    seed: int
    impl: str
    front_end: str
    backend: str
    world: int
    streams: int
    param_dtype: str
    reduce_dtype: str
    gather_quantized: str | None
    reduce_quantized: str | None
    reshard: bool | int | None
    compare: bool
    resume: bool
    report: bool
    whole_step: bool
    out: Path
    text: Path | None

    @property
    def sequences(self) -> int:
        """Sequences of a step on all ranks together."""
        return self.batch * self.streams

    def saved(self) -> dict[str, object]:
        """Return the options that a resumed run must share with its checkpoint."""
        return {name: value for name, value in asdict(self).items() if name not in FREE}


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Show a default where there is one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False:
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """A parser whose complaint is an exception, so that it is shown once and not on every rank."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage."""
        raise UsageError(f"reading the options: {message} (--help lists all)")


def parse(argv: Sequence[str]) -> Options:
    """Read the options; with --resume, or where torchrun restarted the job, those not given are the
    checkpoint's.
    """
    parser = _parser()
    options = _to_options(parser.parse_args(argv))
    if not options.resume and is_restarted(options.out):
        parser.set_defaults(resume=True)
        options = replace(options, resume=True)
    if options.resume:
        if options.compare:
            parser.error("--resume and --compare exclude each other; leave one out")
        stored = read_run(options.out)["options"]
        _check_fields(stored)
        parser.set_defaults(
            **stored, world=int(os.environ.get("WORLD_SIZE", str(stored["streams"])))
        )
        options = _to_options(parser.parse_args(argv))
        _check_same(stored, options)
    _check_values(options)
    return options


def job() -> str:
    """What tells this job from others, the same after torchrun restarted it; empty if nothing
    does.
    """
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return "" if name == "none" else name


def is_restarted(out: Path) -> bool:
    """Whether there is a checkpoint of this very job, to continue from.

    Raises:
        UsageError: torchrun restarted the job, and did not name it.
    """
    if not job() and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
        raise UsageError(
            "restarting: torchrun gave the job no name, so that its checkpoints cannot be told "
            "from an older run's; start it with torchrun --standalone, or with --rdzv-id"
        )
    return bool(job()) and exists(out) and read_run(out)["job"] == job()


def check_machine(options: Options) -> Text:
    """Raise unless this machine can run the options, and return the text."""
    inductor = options.backend in INDUCTOR_BACKENDS or options.compare
    if inductor:
        compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
        advice = "install it, or give --backend compiled_fsdp_eager, which needs none"
        if options.compare:
            advice = "install it, or leave out --compare, whose per-block compile needs it"
        if shutil.which(compiler) is None:
            raise UsageError(
                f"compiling with Inductor: the C++ compiler {compiler} is not found (CXX names "
                f"another); Inductor makes C++ code for the CPU; {advice}"
            )
        if not Path(sysconfig.get_path("include"), "Python.h").is_file():
            raise UsageError(
                "compiling with Inductor: Python.h, the header of this Python, is not found;"
                f" Inductor's C++ code includes it; {advice}"
            )
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"making the folder --out {options.out}: {error.strerror}; results and checkpoint go"
            " there; give a folder that can be written"
        ) from error
    text = load_text(options.text)
    require_bytes(text, options.length, options.text)
    if options.resume:
        _check_checkpoint(options, text)
    return text


def _check_checkpoint(options: Options, text: Text) -> None:
    stored = read_run(options.out)
    verify(options.out)
    if stored["step"] == options.steps and not is_restarted(options.out):
        raise UsageError(
            f"resuming from {options.out}: all {options.steps} steps are done; the schedule has"
            " ended; for a longer run train anew with more --steps"
        )
    if stored["text"] != text.digest:
        raise UsageError(
            f"resuming from {options.out}: the text has digest {text.digest[:12]}, the checkpoint's"
            f" had {stored['text'][:12]}; a resumed run continues on the same bytes; use the same"
            " Python version or --text folder, or train anew without --resume"
        )


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _parser() -> Parser:
    parser = Parser(
        prog="train.py",
        formatter_class=Help,
        description="Train a byte-level GPT on Python's standard library with a sharded, compiled "
        "model. Started by torchrun, or without it: then it starts --world ranks under torchrun.",
    )
    add = parser.add_argument
    add("--model", choices=MODELS, default="gpt", help="moe: a mixture of 8 experts in each block,"
        " shared among the ranks; it computes as much for a byte as the gpt does")  # fmt: skip
    add("--size", choices=list(SIZES), default="10m", help="number of parameters")
    add("--steps", type=int, help="optimizer steps, the length of the schedule (default: fills"
        " --minutes)")  # fmt: skip
    add("--minutes", type=float, help="time budget of the whole command, compilation included; with"
        f" --steps, a limit (default: {DEFAULT_MINUTES:g}, {COMPARE_MINUTES:g} with --compare,"
        " none with --steps)")  # fmt: skip
    add("--stop-after", type=int, metavar="N", help="pause after step N; --resume continues")
    add("--save-every", type=int, metavar="N", help="also write the checkpoint every N steps;"
        " torchrun --max-restarts continues from the last (default: at the end only)")  # fmt: skip
    add("--batch", type=int, default=4, help="sequences per rank and step; a run resumed on another"
        " number of ranks divides the same sequences among them")  # fmt: skip
    add("--length", type=int, default=128, help="bytes per sequence")
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="muon: for the matrices of the"
        " blocks, with AdamW for all else")  # fmt: skip
    add("--lr", type=float, default=2e-3, help="peak learning rate")
    add("--clip", type=float, default=1.0, help="largest gradient norm; 0 for no clipping")
    add("--seed", type=int, default=0, help="seed of the weights and of the data order")
    add("--impl", choices=["compiled_fsdp", "stock"], default="compiled_fsdp",
        help="whose fully_shard; stock is torch.distributed.fsdp")  # fmt: skip
    add("--front-end", choices=["fsdp2", "fsdp1"], default="fsdp2",
        help="fully_shard, or FullyShardedDataParallel")  # fmt: skip
    add("--backend", choices=BACKENDS, default="inductor", help="of torch.compile; eager is none;"
        " compiled_fsdp_eager compiles in seconds, without a C++ compiler")  # fmt: skip
    add("--world", type=int, default=int(os.environ.get("WORLD_SIZE", "2")), help="ranks")
    parser.set_defaults(streams=None)
    add("--param-dtype", choices=DTYPES, default="float32", help="of gathering and compute")
    add("--reduce-dtype", choices=DTYPES, default="float32", help="of gradient reduction")
    add("--gather-quantized", choices=CODES, help="gather parameters as codes of eight bits"
        " (default: as they are)")  # fmt: skip
    add("--reduce-quantized", choices=CODES, help="send gradients as codes of eight bits"
        " (default: as they are)")  # fmt: skip
    add("--reshard", type=_reshard, default=True, metavar="{true,false,none,INT}",
        help="reshard_after_forward of every unit")  # fmt: skip
    add("--compare", action="store_true", help="train the same with stock FSDP2, eager and with"
        " per-block compile, and show all side by side; the time budget is divided by three,"
        " so each takes fewer steps")  # fmt: skip
    add("--resume", action="store_true", help="continue from the checkpoint in --out; options not"
        " given are the checkpoint's")  # fmt: skip
    add("--report", action="store_true", help="write report.html to --out: timeline, memory,"
        " buckets and passes of the compiled step, with a profiled step laid over the predicted"
        " one; compiles without caches")  # fmt: skip
    add("--whole-step", action="store_true", help="forward, loss, backward, clipping and optimizer"
        " as one graph (compile_step)")  # fmt: skip
    add("--out", type=Path, default=Path("out/train"), help="folder for checkpoint and results")
    add("--text", type=Path, help="folder with .py files (default: Python's standard library)")
    return parser


def _reshard(text: str) -> bool | int | None:
    named = {"true": True, "false": False, "none": None}
    return named[text.lower()] if text.lower() in named else int(text)


_reshard.__name__ = "true, false, none or integer"


def _to_options(namespace: argparse.Namespace) -> Options:
    values = vars(namespace)
    if values["minutes"] is None and values["steps"] is None:
        values["minutes"] = COMPARE_MINUTES if values["compare"] else DEFAULT_MINUTES
    return Options(**{**values, "streams": values["streams"] or values["world"]})


def _check_values(options: Options) -> None:
    """Raise one error that lists every value out of range."""
    bounds = {
        "steps": 1, "stop_after": 1, "save_every": 1, "batch": 1, "length": 1, "world": 1,
        "clip": 0, "seed": 0,
    }  # fmt: skip
    wrong = [
        f"{_flag(name)} is {value}, must be at least {least}"
        for name, least in bounds.items()
        if (value := getattr(options, name)) is not None and value < least
    ]
    wrong += [
        f"{_flag(name)} is {value:g}, must be above 0"
        for name in ("minutes", "lr")
        if (value := getattr(options, name)) is not None and not value > 0
    ]
    if options.length > (longest := SIZES[options.size].max_length):
        wrong.append(f"--length is {options.length}, --size {options.size} takes at most {longest}")
    launched = int(os.environ.get("WORLD_SIZE", options.world))
    if options.world != launched:
        wrong.append(f"--world is {options.world}, but torchrun started {launched} ranks")
    if options.front_end == "fsdp1" and not isinstance(options.reshard, bool):
        wrong.append(
            f"--reshard is {options.reshard}, --front-end fsdp1 knows true (FULL_SHARD) and false "
            "(SHARD_GRAD_OP)"
        )
    if options.world > 0 and options.sequences % options.world:
        wrong.append(
            f"--world is {options.world}, does not divide the {options.sequences} sequences of a "
            "step"
        )
    if options.model == "moe" and options.world > 0 and (num := NUM_EXPERTS) % options.world:
        wrong.append(f"--world is {options.world}, does not divide the {num} experts of a block")
    wrong += _excluding(options)
    if wrong:
        raise UsageError(f"checking the options: {'; '.join(wrong)}")


def _excluding(options: Options) -> list[str]:
    """Options that do not go together."""
    wrong = []
    if options.impl == "stock" and options.backend.startswith("compiled_fsdp"):
        wrong.append(
            f"--backend {options.backend} needs --impl compiled_fsdp; give inductor or eager"
        )
    codes = options.gather_quantized or options.reduce_quantized
    if codes and (options.impl == "stock" or options.front_end == "fsdp1"):
        wrong.append(
            "--gather-quantized and --reduce-quantized need --impl compiled_fsdp and --front-end "
            "fsdp2; leave them out"
        )
    if options.model == "moe" and options.front_end == "fsdp1":
        wrong.append("--model moe leaves its experts to their ranks, by fully_shard; give gpt")
    is_loop = options.impl == "stock" or options.backend == "eager" or options.front_end == "fsdp1"
    if options.whole_step and is_loop:
        wrong.append(
            "--whole-step is for --impl compiled_fsdp, --front-end fsdp2 and a "
            "backend other than eager; leave it out"
        )
    wrong += _excluding_muon(options)
    if options.report and (options.impl == "stock" or options.backend == "eager"):
        wrong.append(
            f"--report shows our compiled graphs, and --impl {options.impl} --backend "
            f"{options.backend} makes none; leave it out"
        )
    if options.compare and options.stop_after is not None:
        wrong.append("--stop-after does not go with --compare, which saves no pause; leave one out")
    if options.compare and options.save_every is not None:
        wrong.append(
            "--save-every does not go with --compare, which saves at the end only; leave one out"
        )
    if options.compare and options.steps is not None and options.minutes is not None:
        wrong.append("--minutes does nothing beside --compare and --steps; leave it out")
    if options.compare and options.impl == "stock":
        wrong.append("--compare adds stock FSDP2 itself; leave out --impl stock")
    return wrong


def _excluding_muon(options: Options) -> list[str]:
    """What does not go with Muon."""
    if options.optimizer != "muon":
        return []
    wrong = []
    if options.front_end == "fsdp1":
        wrong.append(
            "--optimizer muon needs whole matrices of fully_shard's parameters; leave out "
            "--front-end fsdp1"
        )
    if options.compare:
        wrong.append(
            "--compare is for AdamW; how torch.optim.Muon does on stock's shards is measured by "
            'make bench ARGS="muon"; leave one out'
        )
    return wrong


def _check_fields(stored: dict[str, object]) -> None:
    """Raise unless the checkpoint was written by this version of the script."""
    known = {field.name for field in fields(Options)}.difference(FREE)
    if stored.keys() != known:
        differing = sorted(known.symmetric_difference(stored))
        raise UsageError(
            f"reading the checkpoint: its options differ in {', '.join(differing)} from this"
            " script's; it was written by another version; train anew without --resume"
        )


def _check_same(stored: dict[str, object], options: Options) -> None:
    asked = options.saved()
    differing = [
        f"{_flag(name)} is {asked[name]}, the checkpoint has {value}"
        for name, value in stored.items()
        if asked[name] != value
    ]
    if differing:
        raise UsageError(
            f"resuming from {options.out}: {'; '.join(differing)}; a resumed run continues the same"
            " training; leave these options out, or train anew without --resume"
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
