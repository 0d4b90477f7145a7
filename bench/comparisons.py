"""What `make bench` compares: a setting, our command in it, and its peers with the ratios they are held to."""

from dataclasses import dataclass
from pathlib import Path

MEMORY_GOAL = 0.5  # of the peer that keeps whole logits


@dataclass(frozen=True)
class PeerKind:
    name: str
    arguments: tuple[str, ...]  # of bench/peers/peer.py; for ours: settings of the command, in place of those of the setting
    speed_goal: float | None = None  # our tokens/s over theirs
    memory_goal: float | None = None  # our peak bytes over theirs
    ours: bool = False  # tessera itself, in another way

    @property
    def has_local_steps(self) -> bool:
        """Whether it can leave out what it exchanges."""
        return not self.ours and "--sharding" not in self.arguments


@dataclass(frozen=True)
class Setting:
    model: str  # recipes/bench_<model>.toml
    compute: str
    ranks: int
    peers: tuple[PeerKind, ...]
    steps: int  # of one turn
    turns: int
    quick: bool  # part of --quick
    recompute: bool = False  # every block, on both sides
    stage: int = 0  # zero.stage of ours
    bound_goal: float | None = None  # share of the matrix products' rate
    tensor: bool = False  # the ranks share every layer instead of the batch
    pipeline: str = ""  # the link that begins the second of two stages: the ranks are a pipeline, with micro-batches of one sequence

    @property
    def name(self) -> str:
        ranks = f" x{self.ranks}" if self.ranks > 1 else ""
        how = " tensor" * self.tensor + (f" pp {self.pipeline}" if self.pipeline else "")
        return f"{self.model} {self.compute}{ranks}{how}" + " recompute" * self.recompute + (f" stage {self.stage}" if self.stage else "")

    def recipe(self, root: Path) -> Path:
        return root / "recipes" / f"bench_{self.model}.toml"

    def our_settings(self, global_size: int, peer: PeerKind | None = None) -> list[str]:
        """A rank takes its share of the batch in one forward, as the peer does: all of it where layers are shared, one sequence in a pipeline. With `peer`: of ours in another way."""
        micro_size = 1 if self.pipeline else global_size // (1 if self.tensor else self.ranks)
        settings = [f"precision.compute={self.compute}", f"batch.micro_size={micro_size}"]
        settings += ["mesh.pp=2", "pipeline.schedule=1f1b", f'pipeline.split=["{self.pipeline}"]'] if self.pipeline else []
        settings += [f"mesh.tp={self.ranks}", "comm.backend=shm"] if self.tensor else []
        settings += ["recompute.mode=full"] if self.recompute else []
        return settings + (list(peer.arguments) if peer else [f"zero.stage={self.stage}"])

    def peer_arguments(self, peer: PeerKind) -> list[str]:
        return ["--compute", self.compute, "--ranks", str(self.ranks), *(["--recompute"] if self.recompute else []), *peer.arguments]


CHUNKED = ("--loss", "chunked")
COMPILE = ("--compile",)


def eager(speed_goal=None, memory_goal=None):
    return PeerKind("eager", (), speed_goal, memory_goal)


def eager_chunked():
    return PeerKind("eager, chunked loss", CHUNKED)


def tensor_parallel(model: str, steps: int) -> Setting:
    """Layers cut over two ranks, through shared memory, beside PyTorch's own, and ours in its other forms."""
    peers = (
        PeerKind("PyTorch TP", ("--sharding", "tp"), 1.5),
        PeerKind("PyTorch TP, sequence parallel", ("--sharding", "tp-sequence"), 1.5),
        PeerKind("tessera, sequence parallel", ("tensor.sequence_parallel=true",), ours=True),
        PeerKind("tessera over Gloo", ("comm.backend=gloo",), ours=True),
    )
    return Setting(model, "fp32", 2, peers, steps=steps, turns=2, quick=False, bound_goal=0.75, tensor=True)


def pipeline(model: str, blocks: int, behind: int, steps: int) -> Setting:
    """Two stages, cut behind the same one of so many blocks, beside PyTorch's pipelining, and ours in its other forms."""
    peers = (
        PeerKind("PyTorch 1F1B", ("--sharding", "pp", "--split", str(behind)), 1.3),
        PeerKind("tessera zb_h1", ("pipeline.schedule=zb_h1",), ours=True),
        PeerKind("tessera over Gloo", ("comm.backend=gloo",), ours=True),
    )
    link = "head" if behind == blocks else f"layers.{behind}"
    return Setting(model, "fp32", 2, peers, steps=steps, turns=2, quick=False, pipeline=link)


SETTINGS = (
    Setting("vocab", "fp32", 1, (eager(1.25, MEMORY_GOAL), eager_chunked()), steps=2, turns=2, quick=True, bound_goal=0.88),
    Setting(
        "vocab",
        "bf16",
        1,
        (eager(1.8, MEMORY_GOAL), eager_chunked(), PeerKind("torch.compile", COMPILE, 1.5), PeerKind("torch.compile, chunked loss", COMPILE + CHUNKED)),
        steps=3,
        turns=2,
        quick=False,
        bound_goal=0.65,
    ),
    Setting("vocab", "fp32", 2, (PeerKind("DDP", (), 1.1), PeerKind("DDP, chunked loss", CHUNKED)), steps=2, turns=2, quick=True, bound_goal=0.85),
    Setting(
        "vocab",
        "fp32",
        2,
        (PeerKind("tessera DDP", ("zero.stage=0",), 0.95, ours=True), PeerKind("FSDP2", ("--sharding", "fsdp2"), 1.3)),
        steps=2,
        turns=2,
        quick=False,
        stage=3,
    ),
    tensor_parallel("vocab", steps=2),
    tensor_parallel("matmul", steps=1),
    pipeline("vocab", blocks=6, behind=3, steps=2),
    pipeline("vocab", blocks=6, behind=6, steps=2),  # the head costs as much as all blocks
    pipeline("matmul", blocks=8, behind=4, steps=1),
    Setting("matmul", "fp32", 1, (eager(1.1),), steps=1, turns=2, quick=False, bound_goal=0.88),
    Setting("matmul", "bf16", 1, (eager(), PeerKind("torch.compile", COMPILE, 1.2)), steps=2, turns=2, quick=False, bound_goal=0.65),
    Setting("matmul", "bf16", 1, (PeerKind("torch.utils.checkpoint", ()),), steps=2, turns=2, quick=False, recompute=True),
)
# --quick: without torch.compile, which takes a minute to start, and without the large model.
QUICK_SETTINGS = tuple(s for s in SETTINGS if s.quick) + (Setting("vocab", "bf16", 1, (eager(1.8, MEMORY_GOAL), eager_chunked()), steps=2, turns=2, quick=True),)
