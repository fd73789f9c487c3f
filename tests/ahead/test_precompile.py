"""A model that one process has compiled ahead, for ranks that were not there: what it computes,
that no compiler runs, and everything that it refuses.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import kit.ahead
import pytest
import torch
import torch.distributed as dist
from kit.ahead import BATCH, CASES, FACTORS, OFFSETS, SHIFTS, WIDTH, Block, Gain, precompile
from kit.harness import SLOW
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.fsdp import FSDPModule as StockFSDPModule
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError
from torch.testing._internal.distributed.fake_pg import FakeStore

import compiled_fsdp
from compiled_fsdp import (
    DivergenceError,
    PrecompiledError,
    Target,
    fully_shard,
    load_precompiled,
    planned,
)
from compiled_fsdp.ahead import facts, target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from kit.pool import Pool

TWO, MORE = ("plain", "fsdp1", "lengths"), ("bfloat16", "tied")  # in `make test-all` alone
# Files whose code is a compiler's, by the end of their path.
COMPILERS = {
    "_dynamo/convert_frame.py": "Dynamo",
    "_functorch/aot_autograd.py": "AOTAutograd",
    "_inductor/compile_fx.py": "Inductor",
    "_inductor/cpp_builder.py": "C++",
    "compiler/driver.py": "passes",
}


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """How many functions are called in each compiler."""
    found: Counter[str] = Counter()
    known: dict[str, str] = {}

    def called(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            file = frame.f_code.co_filename
            if file not in known:
                known[file] = next((n for end, n in COMPILERS.items() if file.endswith(end)), "")
            if known[file]:
                found[known[file]] += 1

    sys.setprofile(called)
    try:
        yield found
    finally:
        sys.setprofile(None)


def loss_of(output: Any) -> torch.Tensor:
    loss: torch.Tensor = output["loss"] if isinstance(output, dict) else output[0]
    return loss


def tensors(output: Any) -> list[torch.Tensor]:
    values = output.values() if isinstance(output, dict) else output
    return [value.detach().clone() for value in values if isinstance(value, torch.Tensor)]


def train(model: Any, case: Any, *, backwards: int = 2, steps: int = 2) -> list[torch.Tensor]:
    """Steps of an optimizer, two backwards each, with an evaluation between; all that comes out."""
    torch.manual_seed(7 + dist.get_rank() // case.same_data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found = []
    for _ in range(steps):
        for _ in range(backwards):
            output = model(*case.example())
            loss_of(output).backward()
            found += tensors(output)
        found += [_local(p.grad).clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            found += tensors(model(*case.example()))
        model.train()
    if isinstance(model, StockFSDPModule):
        model.reshard()  # what the evaluation has left
    return found + [_local(p.detach()) for p in model.parameters()] + list(model.buffers())


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def same_as_compiled(
    name: str, folder: str, sha256: str, readers: tuple[int, ...] | None = None
) -> None:
    """The compiled model, or stock where the case has it.
    readers: the ranks that see the folder.
    """
    case = CASES[name]
    loaded = case.model()
    seen = readers is None or dist.get_rank() in readers
    with counted() as calls:
        path = f"{folder if seen else '/nowhere'}/{name}"
        load_precompiled(path, loaded, sha256=sha256, readers=readers)
        ours = train(loaded, case)
    assert not calls
    if case.build_stock is None:
        compiled = case.model()
        compiled.compile(backend=case.backend, dynamic=False, fullgraph=True)
        theirs = train(compiled, case)
        assert len(ours) == len(theirs)
        assert all(map(torch.equal, ours, theirs))
        return
    again = load_precompiled(f"{folder}/{name}", case.model())
    once = train(again, case, backwards=1)
    theirs = train(case.stock(), case, backwards=1)  # of several, stock adds what is Partial
    assert len(once) == len(theirs)
    assert all(map(torch.equal, once, theirs))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, str]]:
    """A folder of all cases, compiled by one process, and the SHA-256 of each."""
    folder = tmp_path_factory.mktemp("made")
    return str(folder), precompile(folder, *TWO, "other_plan", "inductor", "experts")


@pytest.fixture(scope="module")
def made_more(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, str]]:
    """The same of what `make test` leaves out."""
    folder = tmp_path_factory.mktemp("more")
    return str(folder), precompile(folder, *MORE, "hsdp", "tensor_parallel")


@pytest.mark.parametrize("name", [*TWO, *MORE])
def test_it_computes_what_the_compiled_model_does(
    two: Pool, name: str, request: pytest.FixtureRequest
) -> None:
    """Bit by bit, over several steps, and no compiler is called: not Dynamo, AOTAutograd or our
    passes.
    """
    folder, digests = request.getfixturevalue("made" if name in TWO else "made_more")
    two.run(same_as_compiled, name, folder, digests[name])


def test_what_is_counted() -> None:
    """A compilation is; our passes look at it too once another test has installed them."""
    with counted() as calls:
        torch.compile(lambda x: x + 1)(torch.ones(3))
    assert {*calls} | {"passes"} == {*COMPILERS.values()}


def test_with_replicas(four: Pool, made_more: tuple[str, dict[str, str]]) -> None:
    folder, digests = made_more
    four.run(same_as_compiled, "hsdp", folder, digests["hsdp"])


def test_some_ranks_read(two: Pool, made: tuple[str, dict[str, str]]) -> None:
    """What is wrong on one of them is said on all, in the same words, and nobody waits for it."""
    folder, digests = made
    assert (
        two.run(what_readers_say, folder, digests["plain"])
        == [
            [
                "load_precompiled: not every rank of readers could read its folder, so no rank "
                "loads it:\n"
                "  rank 1: load_precompiled: /nowhere has no manifest.json. Name the folder "
                "that precompile wrote",
                "load_precompiled: readers found different folders: "
                f"ranks [0] the manifest {digests['plain']}; "
                f"ranks [1] the manifest {digests['other_plan']}. Copy the same folder to "
                "all of them",
                "load_precompiled: not every rank of readers could read its folder, so no rank "
                "loads it:\n"
                f"  rank 0: load_precompiled: the SHA-256 of {folder}/plain/manifest.json is "
                f"{digests['plain']}, and should be 00. Nothing in the folder was executed. Take "
                "the folder that precompile returned this for",
                "load_precompiled: readers=[2]; should be some of the ranks 0 to 1",
            ]
        ]
        * 2
    )


def what_readers_say(folder: str, sha256: str) -> list[str]:
    own, rank = f"{folder}/plain", dist.get_rank()
    found = []
    for path, expected, readers in (
        ("/nowhere" if rank else own, sha256, (0, 1)),
        (f"{folder}/other_plan" if rank else own, None, (0, 1)),
        (own, "00", (0,)),
        (own, sha256, (2,)),
    ):
        with pytest.raises((PrecompiledError, ValueError)) as caught:
            load_precompiled(path, CASES["plain"].model(), sha256=expected, readers=readers)
        found.append(str(caught.value))
    model = load_precompiled("/nowhere" if rank else own, CASES["plain"].model(), readers=[0])
    assert model(*CASES["plain"].example())["power"] == 1, "and the ranks can go on"
    return found


def test_with_tensor_parallelism(four: Pool, made_more: tuple[str, dict[str, str]]) -> None:
    """Ranks that differ along "tp" have programs of their own, since parts of the vocabulary and of
    the sequence begin elsewhere; those that differ along "dp" share one. One rank alone sees the
    folder: it sends it to two others, of which one sends it to the last.
    """
    folder, digests = made_more
    manifest = json.loads(Path(folder, "tensor_parallel", "manifest.json").read_text())
    ranks = {(p["mode"], *p["ranks"]) for p in manifest["programs"]}
    assert ranks == {(mode, *of) for mode in ("training", "inference") for of in ((0, 2), (1, 3))}
    four.run(same_as_compiled, "tensor_parallel", folder, digests["tensor_parallel"], (1,))


def test_with_experts(four: Pool, made: tuple[str, dict[str, str]]) -> None:
    """One program for all ranks, which exchange as many tokens as they have for each other."""
    folder, digests = made
    manifest = json.loads(Path(folder, "experts", "manifest.json").read_text())
    assert [sorted(p["ranks"]) for p in manifest["programs"]] == [[0, 1, 2, 3]] * 2
    four.run(same_as_compiled, "experts", folder, digests["experts"])


@pytest.mark.timeout(SLOW)
def test_with_inductor(two: Pool, made: tuple[str, dict[str, str]]) -> None:
    """Neither Inductor nor a C++ compiler is called."""
    folder, digests = made
    two.run(same_as_compiled, "inductor", folder, digests["inductor"], timeout=SLOW)


def test_ranks_that_run_different_folders_are_told(
    two: Pool, made: tuple[str, dict[str, str]]
) -> None:
    """The comparison of ranks is still there, since it stands in the graph."""
    try:
        two.run(run_different, made[0])
    finally:  # where one rank knew its graph, from another test, the watchers broke connections
        two.close()


def run_different(folder: str) -> None:
    rank, case = dist.get_rank(), CASES["plain"]
    model = case.model()
    with planned(bucket_bytes=1 << 20 if rank else 0):
        load_precompiled(f"{folder}/{'other_plan' if rank else 'plain'}", model)
    with pytest.raises(DivergenceError, match="all_gather"):
        model(*case.example())


def test_one_of_ranks_that_are_there(two: Pool, tmp_path: Path) -> None:
    """It would wait for the others at the model's first call."""
    two.run(refused_among_others, str(tmp_path))


def refused_among_others(path: str) -> None:
    case = CASES["plain"]
    model = case.model()
    if dist.get_rank() == 0:
        words = r"2 ranks and the backend 'gloo'.* Compile in a process of its own"
        with pytest.raises(ValueError, match=words):
            compiled_fsdp.precompile(model, case.example(), f"{path}/a", target=HERE)


# -- in one process, as one rank of two that are not there


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for ranks over a group of the backend "fake"."""
    folder, case = tmp_path_factory.mktemp("ahead") / "folder", CASES["plain"]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    compiled_fsdp.precompile(case.model(), case.example(), folder, target=HERE)
    dist.destroy_process_group()
    return folder


@pytest.fixture
def ahead(written: Path, fake_world: None, tmp_path: Path) -> Path:
    """A copy of it, for this process, which is such a rank."""
    return Path(shutil.copytree(written, tmp_path / "ahead"))


HERE = Target(group_backend="fake", backend="compiled_fsdp_eager")


def refused(ahead: Path, model: Any, *names: str) -> str:
    """What `load_precompiled` says, which lists these and nothing else."""
    with pytest.raises(PrecompiledError, match="was compiled for something else") as caught:
        load_precompiled(ahead, model)
    assert {*caught.value.differences} == {*names}, caught.value
    for name, (before, here) in caught.value.differences.items():
        assert f"{name}: {before}, here {here}" in str(caught.value)
    return str(caught.value)


def test_another_environment(ahead: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that differs is listed at once, each by name with both values."""
    model = CASES["plain"].model()
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    monkeypatch.setattr(target, "__version__", "99")
    monkeypatch.setattr(target, "source_hash", lambda: "0" * 64)
    monkeypatch.setattr(target.platform, "machine", lambda: "abacus")
    monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.float64)
    with planned(prefetch=1), compiled_fsdp.pipeline(without=["free"]):
        names = ("torch", "compiled_fsdp", "sources of compiled_fsdp", "machine", "Plan.prefetch")
        text = refused(ahead, model, *names, "pipeline", "default dtype")
    assert "Plan.prefetch: 2.0, here 1" in text
    assert "here 2.99.0" in text


def test_another_world(ahead: Path) -> None:
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    model = CASES["plain"].model()
    with pytest.raises(PrecompiledError) as caught:
        load_precompiled(ahead, model)
    found = caught.value.differences
    assert found["world size"] == ("2", "4")
    assert found["unit 0 (blocks.0): mesh"][1] == "1 replicas, each of 4 ranks"
    assert found["parameter blocks.0.up.weight: group_size"] == ("2", "4")


def test_another_backend_of_groups(fake_world: None, tmp_path: Path) -> None:
    case = CASES["plain"]
    meant = Target(backend="compiled_fsdp_eager", modes=("inference",))
    compiled_fsdp.precompile(case.model(), case.example(), tmp_path / "a", target=meant)
    with pytest.raises(PrecompiledError) as caught:
        load_precompiled(tmp_path / "a", case.model())
    found = caught.value.differences
    assert found["unit 0 (blocks.0): backend of the process group"] == ("gloo", "fake")
    assert found["parameter head.weight: reduce_algorithm"] == ("all_to_all", "reduce_scatter")


def test_another_model(ahead: Path) -> None:
    frozen = CASES["plain"].model()
    frozen.blocks[1].scale = 3.0
    frozen.head.bias.requires_grad_(requires_grad=False)
    frozen.blocks[0].norm.register_buffer("more", torch.zeros(3))
    text = refused(
        ahead,
        frozen,
        "parameter head.bias: requires_grad",
        "buffer blocks.0.norm.more",
        "model.blocks.1.scale",
    )
    assert "model.blocks.1.scale: (nothing), here =3.0" in text  # it was the class's


def test_another_policy(ahead: Path) -> None:
    with pytest.raises(PrecompiledError) as caught:
        load_precompiled(ahead, CASES["bfloat16"].model())
    found = caught.value.differences
    policy = "unit 0 (blocks.0): mp_policy.param_dtype"
    assert found[policy] == ("None", "torch.bfloat16")
    assert found["parameter blocks.0.up.weight: dtype"] == ("torch.float32", "torch.bfloat16")


def test_another_source(fake_world: None, tmp_path: Path) -> None:
    """Comments and layout do not count, another operation does."""
    path = tmp_path / "a_model_of_mine.py"
    text = (
        "import torch\nclass Mine(torch.nn.Linear):\n    def forward(self, x):\n        return {}\n"
    )
    path.write_text(text.format("super().forward(x).sin()"))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    assert spec.loader is not None
    spec.loader.exec_module(module)
    model = fully_shard(module.Mine(4, 4))
    compiled_fsdp.precompile(model, torch.ones(2, 4), tmp_path / "a", target=HERE)
    path.write_text("# mine\n" + text.format("super( ).forward(x).sin()  # a sine"))
    load_precompiled(tmp_path / "a", fully_shard(module.Mine(4, 4)))
    path.write_text(text.format("super().forward(x).cos()"))
    refused(
        tmp_path / "a", fully_shard(module.Mine(4, 4)),
        "source of a_model_of_mine.py: Mine.forward",
    )  # fmt: skip


def _rescaled(model: Any) -> None:
    with mock.patch.object(Block, "scale", 2.0):
        model(torch.ones(BATCH, WIDTH))


def doubled(x: torch.Tensor) -> torch.Tensor:
    """As the model's is called, which does something else."""
    return x * 3


def _recoded(model: Any) -> None:
    function: Any = kit.ahead.doubled
    before, function.__code__ = function.__code__, doubled.__code__
    try:
        model(torch.ones(BATCH, WIDTH))
    finally:
        function.__code__ = before


CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a shape": (lambda m: m(torch.ones(3, WIDTH)), "argument 0: shape: [4, 8], here [3, 8]"),
    "a dtype": (
        lambda m: m(torch.ones(BATCH, WIDTH).double()),
        "argument 0: dtype: torch.float32, here torch.float64",
    ),
    "a stride": (lambda m: m(torch.ones(WIDTH, BATCH).t()), "argument 0: stride: [8, 1]"),
    "a gradient": (
        lambda m: m(torch.ones(BATCH, WIDTH, requires_grad=True)),
        "argument 0: requires_grad: False, here True",
    ),
    "an argument": (lambda m: m(torch.ones(BATCH, WIDTH), power=2), "how arguments are nested"),
    "evaluation with gradients": (
        lambda m: m.eval()(torch.ones(BATCH, WIDTH)),
        "model.blocks.0.drop.training: =True, here =False",
    ),
    "training without gradients": (
        lambda m: torch.no_grad()(m)(torch.ones(BATCH, WIDTH)),
        "model.blocks.0.drop.training: =False, here =True",
    ),
    "autocast": (
        lambda m: torch.autocast("cpu")(m)(torch.ones(BATCH, WIDTH)),
        "autocast: off, here torch.bfloat16 on cpu",
    ),
    "an attribute": (
        lambda m: (setattr(m.blocks[0], "scale", 2.0), m(torch.ones(BATCH, WIDTH))),
        "model.blocks.0.scale: (nothing), here =2.0",
    ),
    "a class attribute": (_rescaled, "model.blocks.0.scale: =1.0, here =2.0"),
    "a hook": (
        lambda m: (
            m.head.register_forward_hook(lambda *_: None),
            m(torch.ones(BATCH, WIDTH)),
        ),
        "len(model.head._forward_hooks): =0, here =1",
    ),
    "accumulation": (
        lambda m: (m.set_requires_gradient_sync(False), m(torch.ones(BATCH, WIDTH))),
        "parameter head.weight: sync: reduce, here retain",
    ),
    "a frozen parameter": (
        lambda m: (m.head.bias.requires_grad_(False), m(torch.ones(BATCH, WIDTH))),
        "parameter head.bias: requires_grad: True, here False",
    ),
    "a frozen unit": (
        lambda m: (m.blocks[0].requires_grad_(False), m(torch.ones(BATCH, WIDTH))),
        "parameter blocks.0.up.weight: requires_grad: True, here False",
    ),
    "another module": (
        lambda m: (setattr(m.blocks[0], "drop", nn.Identity()), m(torch.ones(BATCH, WIDTH))),
        "model.blocks.0.drop: torch.nn.modules.dropout.Dropout, here torch.nn.modules.linear.Ident",
    ),
    "modules in another order": (
        lambda m: (
            setattr(m, "blocks", nn.ModuleList(m.blocks[::-1])),
            m(torch.ones(BATCH, WIDTH)),
        ),
        "parameter blocks.0.up.weight: held as: blocks.0.up.weight, here blocks.1.up.weight",
    ),
    "a parameter that is tied": (
        lambda m: (
            setattr(m.blocks[0].up, "weight", m.blocks[1].up.weight),
            m(torch.ones(BATCH, WIDTH)),
        ),
        "held as: blocks.1.up.weight, here blocks.0.up.weight, blocks.1.up.weight",
    ),
    "modules in another order in the same list": (
        lambda m: (
            m.blocks._modules.update({"0": m.blocks._modules.pop("0")}),
            m(torch.ones(BATCH, WIDTH)),
        ),
        "modules in order: blocks: 0, 1, here 1, 0",
    ),
    "a buffer of another dtype": (
        lambda m: (
            setattr(m.blocks[0].norm, "running_mean", m.blocks[0].norm.running_mean.double()),
            m(torch.ones(BATCH, WIDTH)),
        ),
        "buffer blocks.0.norm.running_mean: (9,) torch.float32 on cpu, here (9,) torch.float64",
    ),
    "another forward of a class": (
        lambda m: mock.patch.object(Block, "forward", nn.Identity.forward)(m)(
            torch.ones(BATCH, WIDTH)
        ),
        "Block.forward: Block.forward, here Identity.forward",
    ),
    "another value of a global": (
        lambda m: mock.patch.dict(OFFSETS, {"first": 2.0})(m)(torch.ones(BATCH, WIDTH)),
        "module kit.ahead.OFFSETS['first']: =0.5, here =2.0",
    ),
    "another global": (
        lambda m: mock.patch("kit.ahead.OFFSETS", dict(OFFSETS, third=0.0))(m)(
            torch.ones(BATCH, WIDTH)
        ),
        "list(module kit.ahead.OFFSETS): ['first', 'second'], here ['first', 'second', 'third']",
    ),
    "a key that was not there": (
        lambda m: mock.patch.dict(FACTORS, {("of", "all"): 2.0})(m)(torch.ones(BATCH, WIDTH)),
        "('of', 'all') in module kit.ahead.FACTORS: =False, here =True",
    ),
    "a key that was there": (
        lambda m: mock.patch("kit.ahead.FACTORS", {})(m)(torch.ones(BATCH, WIDTH)),
        "module kit.ahead.FACTORS[1]: =2.0, here (nothing)",
    ),
    "another global of one key": (
        lambda m: mock.patch.dict(SHIFTS, {"other": 0.0})(m)(torch.ones(BATCH, WIDTH)),
        "list(module kit.ahead.SHIFTS): ['only'], here ['only', 'other']",
    ),
    "what a set holds": (
        lambda m: (m.blocks[1].without.add("drop"), m(torch.ones(BATCH, WIDTH))),
        "model.blocks.1.without: {('a', 'pair'), builtins.type Linear}, here {'drop', ('a', 'p",
    ),
    "a dict in another order": (
        lambda m: (
            m.steps.update(down=m.steps.pop("down")),
            m.steps.update(up=m.steps.pop("up")),
            m(torch.ones(BATCH, WIDTH)),
        ),
        "list(model.steps): ['up', 'down'], here ['down', 'up']",
    ),
    "another function": (
        lambda m: (setattr(m, "ends", torch.neg), m(torch.ones(BATCH, WIDTH))),
        "model.ends",
    ),
    "another function of the same name": (
        lambda m: mock.patch("kit.ahead.doubled", doubled)(m)(torch.ones(BATCH, WIDTH)),
        "module kit.ahead.doubled: builtins.function doubled",
    ),
    "a function that does something else": (
        _recoded,
        "module kit.ahead.doubled: builtins.function doubled",
    ),
    "an object for one of those that shared one": (
        lambda m: (setattr(m.blocks[1], "gain", Gain(2.0)), m(torch.ones(BATCH, WIDTH))),
        "model.blocks.1.gain is model.blocks.0.gain: =True, here =False",
    ),
    "what an object holds that several share": (
        lambda m: (setattr(m.blocks[1].gain, "of", 2.0), m(torch.ones(BATCH, WIDTH))),
        "model.blocks.0.gain.of: =1.0, here =2.0",
    ),
    "a replaced parameter": (
        lambda m: torch.func.functional_call(
            m, {"head.bias": torch.zeros(5)}, torch.ones(BATCH, WIDTH)
        ),
        "Linear.bias: the sharded parameter, here replaced",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_another_call(ahead: Path, name: str) -> None:
    """After one that was compiled for; and that one goes on."""
    call, expected = CALLS[name]
    model = load_precompiled(ahead, CASES["plain"].model())
    model(torch.ones(BATCH, WIDTH))
    with pytest.raises(PrecompiledError) as caught:
        call(model)
    assert expected in str(caught.value)


class Sum(nn.Linear):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (super().forward(x) + y).square().mean()


def test_sizes_that_are_not_known(fake_world: None, tmp_path: Path) -> None:
    """They may be what they were said to be, and where two were found to be one, that."""

    def some(rows: int) -> torch.Tensor:
        return torch.ones(rows, 4)

    x, y = some(4), some(4)
    for tensor in (x, y):
        torch._dynamo.mark_dynamic(tensor, 0, min=2, max=64)
    compiled_fsdp.precompile(fully_shard(Sum(4, 4)), (x, y), tmp_path / "a", target=HERE)
    model = load_precompiled(tmp_path / "a", fully_shard(Sum(4, 4)))
    with counted() as calls:
        for rows in (2, 4, 64):
            model(some(rows), some(rows)).backward()
    assert not calls
    expected = {
        (1, 1): ["argument 0: shape", "argument 1: shape"],
        (65, 65): ["argument 0: shape", "argument 1: shape"],
        (3, 5): ["argument 1: shape"],
    }
    for rows, names in expected.items():
        with pytest.raises(PrecompiledError, match=r"\(2 to 64\)', 4\], here") as caught:
            model(*map(some, rows))
        assert [*caught.value.differences] == names
    with pytest.raises(PrecompiledError, match="argument 0: stride: contiguous, here"):
        model(torch.ones(4, 3).t(), some(3))
    again = fully_shard(Sum(4, 4))
    model = load_precompiled(tmp_path / "a", again, otherwise="compile")
    with pytest.warns(UserWarning, match="argument 0: shape"):
        model(some(65), some(65)).backward()


class Halved(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).view(2, -1, 4)


class Counts(nn.Linear):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return super().forward(x), x.shape[0]


def test_sizes_that_cannot_be_unknown(fake_world: None, tmp_path: Path) -> None:
    x, strided = torch.ones(4, 4), torch.ones(4, 4).t()
    for tensor in (x, strided):
        torch._dynamo.mark_dynamic(tensor, 0, min=2, max=64)
    for kind, example, error, words in (
        (Halved, x, ConstraintViolationError, "Not all values"),
        (Counts, x, NotImplementedError, "returns what is no tensor: SymInt"),
        (nn.Linear, strided, NotImplementedError, "should be contiguous"),
    ):
        with pytest.raises(error, match=words):
            compiled_fsdp.precompile(fully_shard(kind(4, 4)), example, tmp_path / "a", target=HERE)


def test_a_mode_that_is_not_there(fake_world: None, tmp_path: Path) -> None:
    case = CASES["plain"]
    only = Target(group_backend="fake", backend="compiled_fsdp_eager", modes=("inference",))
    compiled_fsdp.precompile(case.model(), case.example(), tmp_path / "a", target=only)
    model = load_precompiled(tmp_path / "a", case.model())
    with pytest.raises(PrecompiledError, match="mode: inference, here training"):
        model(*case.example())


def test_a_unit_that_was_frozen_once_it_was_sharded(fake_world: None, tmp_path: Path) -> None:
    """It is the same when it is loaded; once it is trained, it is another."""
    case = CASES["plain"]

    def build() -> Any:
        model: Any = case.model()
        model.blocks[0].requires_grad_(False)
        return model

    compiled_fsdp.precompile(build(), case.example(), tmp_path / "a", target=HERE)
    model = load_precompiled(tmp_path / "a", build())
    model(*case.example())
    model.blocks[0].requires_grad_(True)
    with pytest.raises(PrecompiledError, match=r"blocks\.0\.up\.weight: requires_grad: False"):
        model(*case.example())


class Beside(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.gain = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (super().forward(x) * self.gain).sum()


def test_a_parameter_of_no_unit_that_is_trained_later(fake_world: None, tmp_path: Path) -> None:
    def build() -> Any:
        model = Beside()
        return fully_shard(model, ignored_params={model.gain})

    compiled_fsdp.precompile(build(), torch.ones(3, 4), tmp_path / "a", target=HERE)
    model = load_precompiled(tmp_path / "a", build())
    model(torch.ones(3, 4)).backward()
    model.gain.requires_grad_(True)
    with pytest.raises(PrecompiledError, match=r"parameter gain, not sharded: .*, frozen, here"):
        model(torch.ones(3, 4))


def test_compiling_instead_is_announced(ahead: Path) -> None:
    """Where it was asked for: for a call, and for all of the model."""
    model = load_precompiled(ahead, CASES["plain"].model(), otherwise="compile")
    with counted() as calls:
        model(torch.ones(BATCH, WIDTH))
    assert not calls
    with pytest.warns(UserWarning, match=r"argument 0: shape: \[4, 8\], here \[3, 8\]"):
        output = model(torch.ones(3, WIDTH))
    output["loss"].backward()
    assert output["hidden"].shape == (3, WIDTH)
    with planned(prefetch=1), pytest.warns(UserWarning, match="Plan.prefetch"):
        other = load_precompiled(ahead, CASES["plain"].model(), otherwise="compile")
    with counted() as calls:
        other(torch.ones(BATCH, WIDTH))
    assert {*calls} == {"Dynamo", "AOTAutograd", "passes"}


def test_files_that_are_not_what_was_written(ahead: Path) -> None:
    """Nothing is executed: the code that would be raises something else."""
    code, manifest = ahead / "training.0.py", ahead / "manifest.json"
    digest = hashlib.sha256(manifest.read_bytes()).hexdigest()
    load_precompiled(ahead, CASES["plain"].model(), sha256=digest)
    written = code.read_text()
    for change, words in (
        (lambda: code.write_text("raise SystemExit\n" + written), "training.0.py has the SHA-256"),
        (lambda: (ahead / "more.py").write_text("raise SystemExit"), "more.py is not in the"),
        (lambda: (ahead / "more").mkdir(), "more is no file"),
        (code.unlink, "training.0.py is missing"),
        (manifest.unlink, "has no manifest.json"),
    ):
        change()
        with pytest.raises(PrecompiledError, match=words) as caught:
            load_precompiled(ahead, CASES["plain"].model(), otherwise="compile")
        assert not caught.value.differences
        for path in (ahead / "more.py", ahead / "more"):
            path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
        code.write_text(written)


def test_a_manifest_of_somebody_else(ahead: Path) -> None:
    """Consistent in itself, it is refused by who knows the SHA-256 of the right one."""
    path, code = ahead / "manifest.json", ahead / "training.0.py"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    manifest = json.loads(path.read_text())
    code.write_text("raise SystemExit\n")
    manifest["files"][code.name] = hashlib.sha256(code.read_bytes()).hexdigest()
    path.write_text(json.dumps(manifest))
    with pytest.raises(PrecompiledError, match=f"should be {digest}"):
        load_precompiled(ahead, CASES["plain"].model(), sha256=digest)
    with pytest.raises(SystemExit):
        load_precompiled(ahead, CASES["plain"].model())


def test_what_cannot_be_compiled_ahead(fake_world: None, tmp_path: Path) -> None:
    class Remembers(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = x.shape[0] * 2
            return super().forward(x)

    class Views(nn.Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = super().forward(x)
            return y, y.view(-1)

    class Writes(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.mul_(2)
            return super().forward(x)

    class Holds(nn.Linear):
        extra = torch.ones(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.extra

    class Ranked(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (dist.get_rank() + 2)

    class Grouped(nn.Linear):
        group = dist.new_group([0, 1])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return all_reduce(super().forward(x), "sum", self.group)

    expected = {
        Ranked: "the graph of rank 1 is not that of rank 0: forward asks which data-parallel rank",
        Grouped: "forward communicates over the process group '1'",
        Remembers: "forward assigns to objects that outlive it",
        Views: "output 1 shares memory",
        Writes: "forward writes to its input 0",
        Holds: "the graph reads a Tensor of shape",
    }
    for kind, words in expected.items():
        model = fully_shard(kind(4, 4))
        with pytest.raises(NotImplementedError, match=words):
            compiled_fsdp.precompile(model, torch.ones(2, 4), tmp_path / "a", target=HERE)
    assert not (tmp_path / "a").exists()
    with pytest.raises(NotImplementedError, match="device='cuda'"):
        Target(device="cuda")
    frozen = fully_shard(nn.Linear(4, 4).requires_grad_(requires_grad=False))
    with pytest.raises(ValueError, match="no output of the model requires a gradient"):
        compiled_fsdp.precompile(frozen, torch.ones(2, 4), tmp_path / "a", target=HERE)
    with pytest.raises(TypeError, match="is not what fully_shard"):
        compiled_fsdp.precompile(nn.Linear(4, 4), torch.ones(2, 4), tmp_path / "a")
    with planned(prefetch="auto"), pytest.raises(ValueError, match="the plan decides from costs"):
        compiled_fsdp.precompile(fully_shard(nn.Linear(4, 4)), torch.ones(2, 4), tmp_path / "a")


def test_autocast_in_another_dtype(fake_world: None, tmp_path: Path) -> None:
    case = CASES["plain"]
    meant = Target(group_backend="fake", backend="compiled_fsdp_eager", modes=("inference",))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        compiled_fsdp.precompile(case.model(), case.example(), tmp_path / "a", target=meant)
        model = load_precompiled(tmp_path / "a", case.model()).eval()
        model(torch.ones(BATCH, WIDTH))
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        words = "autocast: torch.bfloat16 on cpu, here torch.float16 on cpu"
        with pytest.raises(PrecompiledError, match=words):
            model(torch.ones(BATCH, WIDTH))


SAME_NAMES = """
class A:
    def forward(self, x):
        return x + 1

    @property
    def scale(self):
        return 2

    @scale.setter
    def scale(self, value):
        self.value = value

if A is None:
    def shift(x):
        return x
else:
    def shift(x):
        return x * 2
"""


def test_functions_of_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one file, and in two files of one name: each counts, and none is taken for another."""
    modules: list[Any] = []
    for name in ("one", "other"):
        path = tmp_path / name / "same_names.py"
        path.parent.mkdir()
        path.write_text(SAME_NAMES if name == "one" else SAME_NAMES.replace("x + 1", "x + 3"))
        spec: Any = importlib.util.spec_from_file_location(f"same_names_{name}", path)
        modules.append(importlib.util.module_from_spec(spec))
        monkeypatch.setitem(sys.modules, spec.name, modules[-1])
        spec.loader.exec_module(modules[-1])
    one, other = modules
    codes = [one.shift.__code__, one.A.scale.fset.__code__]
    codes += [one.A.forward.__code__, other.A.forward.__code__]
    found = facts.sources(codes)
    assert facts.sources_now(found) == found
    path = Path(one.__file__)
    path.write_text(SAME_NAMES.replace("x + 1", "x + 2"))
    now = facts.sources_now(found)
    changed = [name for name in found if now[name] != found[name]]
    assert len(changed) == 1
    assert changed[0].endswith("forward")  # before Python 3.11 without its class
    names = facts.together({"a": "1"}, {"a": "2", "b": "3"})
    assert names == {"a": "1 2", "b": "3"}


def test_a_lambda_on_the_line_of_its_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no name: all of the file counts, when written and when read."""
    path = tmp_path / "a_lambda.py"
    path.write_text("def make(k): return lambda x: x * k\n")
    spec: Any = importlib.util.spec_from_file_location("a_lambda", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "a_lambda", module)
    spec.loader.exec_module(module)
    found = facts.sources([module.make(2).__code__])
    assert facts.sources_now(found) == found


def test_modules_that_are_not_called_may_be_added() -> None:
    """Of those that were there the order counts."""
    name = target.ORDER + "model"
    same = ({name: "a, b, c"}, {}), ({name: "a, c, b"}, {name: "a, b"})
    for here, made_for in same:
        assert not target.differences(made_for, here)
    assert target.differences({name: "a, b"}, {name: "b, a"})
    assert target.differences({name: "a, b"}, {name: None})


def test_what_torch_asks_of_its_settings_is_left_out() -> None:
    """As torch 2.15 writes it; a call of anything else cannot be followed."""
    module = "G['__import_torch_dot_nn_dot_modules_dot_module']"
    own = f"{module}.torch.compiler.config._config['compile_on_one_rank'].user_override.get()"
    strange = "L['self'].scale.get()"
    model = nn.Linear(2, 2)
    model.scale = 2.0  # type: ignore[assignment]
    assert facts.facts([own, strange], model) == ({}, [strange])


def test_items_of_a_set() -> None:
    """As torch 2.14 names them. The set's own text says what they are, but not what an object
    holds.
    """
    model: Any = nn.Linear(2, 2)
    model.names, model.objects = {("a", nn.Linear)}, {Path("a")}
    first = ("___set_getitem(L['self'].names, 0)", "___set_getitem(L['self'].names, 0)[1]")
    assert facts.facts(first, model) == ({}, [])
    unknown = "___set_getitem(L['self'].objects, 0)"
    assert facts.facts([unknown], model) == ({}, [unknown])
