"""`make parity`: tessera against Hugging Face's transformers on PyTorch, same weights, same windows, fp32 on CPU.

Per family: logits and loss; gradients of step 1, tensor by tensor; losses, gradient norms and weights of 20 steps of SGD with momentum and of AdamW;
fp16 and bf16 files; 2 and 3 processes; the events as TensorBoard itself reads them. Beside other optimizers: optimizers.py; beside PEFT: lora.py. Then the same comparisons against references with a planted bug, which must fail.

  tools/parity [--binary build/release/bin/tessera] [--only llama]
"""

import argparse
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import compare
import lora
import models
import optimizers
import reference
import torch
from command import Command, CommandFailed, tensorboard_series
from compare import Comparison, Planted, must_fail
from reference import Plan, Plant, Windows

ROOT = Path(__file__).resolve().parent.parent.parent
SGD = Plan("sgd", lr=0.05, momentum=0.9, weight_decay=0.01, max_grad_norm=0.0)
ADAMW = Plan("adamw", lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, max_grad_norm=1.0)
TERMS = Plan("sgd", lr=0.05, weight_decay=0.0, max_grad_norm=0.0, steps=5, balance_loss=0.1, z_loss=0.05)
TEXT_BYTES = 3000  # 93 windows: 20 steps of 6 go round the end of the text once


def write_text(path: Path) -> None:
    """Words and some letters outside ASCII, the same in every run."""
    generator = random.Random(0)
    words = ["".join(generator.choices("etaoinshrdlucmfwyp", k=generator.randint(1, 8))) for _ in range(150)] + ["caf\u00e9", "na\u00efve", "\u2014"]
    text = " ".join(generator.choices(words, k=TEXT_BYTES)).encode()
    path.write_bytes(text[:TEXT_BYTES])


class Family:
    """All checks of one family; the runs of both sides are made once and compared as often as needed."""

    def __init__(self, family: models.Family, command: Command, text: Path):
        self.family, self.command, self.text = family, command, text
        self.windows = Windows(text)
        self.folder = command.scratch / family.name.replace(" ", "_")  # of the fp32 file

    def their_run(self, plan: Plan, plant: Plant = reference.NO_PLANT) -> reference.Run:
        return reference.train(models.make(self.family), self.windows, plan, plant)

    def checks(self) -> Iterator[tuple[str, Comparison]]:
        yield from self.forward(torch.float32)
        sgd = self.command.train(self.folder, self.text, SGD, dump_step=SGD.steps)
        adamw = self.command.train(self.folder, self.text, ADAMW, dump_step=1)
        their_sgd, their_adamw = self.their_run(SGD), self.their_run(ADAMW)
        yield "", compare.gradients(adamw.gradients, their_adamw.gradients)
        for name, ours, theirs in (("sgd", sgd, their_sgd), ("adamw", adamw, their_adamw)):
            yield name, compare.losses(ours.losses, theirs.losses)
            yield name, compare.grad_norms(ours.grad_norms, theirs.grad_norms)
        yield "sgd", compare.weights(f"weights after step {SGD.steps}", sgd.weights, their_sgd.weights[-1])
        yield "adamw", compare.adam_first_weights(adamw, their_adamw.weights[0], their_adamw.gradients)
        yield "tensorboard", compare.series("losses as TensorBoard reads them", tensorboard_series(sgd.log_dir, "train/loss"), sgd.losses, compare.FP32_RTOL)
        for ranks in (2, 3):
            many = self.command.train(self.folder, self.text, SGD, dump_step=1, ranks=ranks)
            yield f"{ranks} processes", compare.gradients(many.gradients, their_sgd.gradients)
            yield f"{ranks} processes", compare.losses(many.losses, their_sgd.losses)
        if self.family.name == "mixtral":
            yield from self.router_terms()
        yield from self.planted(sgd, adamw)
        for dtype in (torch.float16, torch.bfloat16):
            yield from self.forward(dtype)

    def forward(self, dtype: torch.dtype) -> Iterator[tuple[str, Comparison]]:
        """Logits and loss of a file of that type, which both sides compute with in fp32."""
        name = str(dtype).removeprefix("torch.") + " file"
        folder = self.folder if dtype == torch.float32 else self.folder.with_name(f"{self.folder.name}_{name[:4]}")
        models.save(self.family, models.make(self.family), folder, dtype)
        model = models.load(folder)
        loss, logits = self.command.evaluate(folder, self.text)
        tokens, _ = self.windows.batch(0, logits.shape[0])
        yield name, compare.logits(logits, reference.logits(model, tokens))
        yield name, compare.series("loss of the text", [loss], [reference.evaluate(model, self.windows)], compare.LOSS_RTOL)
        window = getattr(model.config, "sliding_window", None)
        if dtype == torch.float32 and window:
            model.config.sliding_window = window + 1
            yield name, must_fail("a window of one more", compare.logits(logits, reference.logits(model, tokens)))
            model.config.sliding_window = window
        if dtype == torch.float32:
            with torch.no_grad():
                model.get_parameter(self.family.norm).mul_(0.5)
            yield name, must_fail("one norm's weight halved", compare.logits(logits, reference.logits(model, tokens)))

    def router_terms(self) -> Iterator[tuple[str, Comparison]]:
        """Gradients with the router's balance and z terms, which must not be those without."""
        ours, theirs = self.command.train(self.folder, self.text, TERMS, dump_step=1), self.their_run(TERMS)
        yield "router terms", compare.gradients(ours.gradients, theirs.gradients)
        yield "router terms", compare.losses(ours.losses, theirs.losses)
        without = self.their_run(replace(TERMS, balance_loss=0.0))
        yield "router terms", must_fail("balance term left out", compare.gradients(ours.gradients, without.gradients))

    def planted(self, sgd, adamw) -> Iterator[tuple[str, Comparison]]:
        """Each comparison of training must fail where the reference has a bug. AdamW's losses are not asked to: they hide a wrong scale."""
        for plant in (Plant("one norm's gradient halved", halved=self.family.norm), Plant("one micro-batch dropped", dropped=1)):
            bad = self.their_run(SGD, plant)
            yield "", must_fail(plant.name, compare.gradients(adamw.gradients, bad.gradients))
            yield "sgd", must_fail(plant.name, compare.losses(sgd.losses, bad.losses))
            yield "sgd", must_fail(plant.name, compare.grad_norms(sgd.grad_norms, bad.grad_norms))
            yield "sgd", must_fail(plant.name, compare.weights(f"weights after step {SGD.steps}", sgd.weights, bad.weights[-1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=Path, default=ROOT / "build" / "release" / "bin" / "tessera")
    parser.add_argument("--only", default="", help="families whose name contains this")
    options = parser.parse_args()
    if not options.binary.exists():
        print(f"parity: {options.binary} does not exist; run `make build` first", file=sys.stderr)
        return 2
    torch.set_num_threads(1)  # the models are tiny
    passed = failed = 0
    with tempfile.TemporaryDirectory(prefix="tessera_parity_") as scratch:
        text = Path(scratch) / "text.txt"
        write_text(text)
        print(f"{'family':<11} {'setting':<13} {'check':<72} {'difference':>10}    {'bound':>7}")
        command = Command(options.binary.resolve(), Path(scratch))
        everything = {family.name: Family(family, command, text).checks() for family in models.FAMILIES} | {
            "optimizers": optimizers.checks(command, text),
            "lora": lora.checks(command, text),
        }
        for family, checks in everything.items():
            if options.only not in family:
                continue
            try:
                for setting, check in checks:
                    passed, failed = passed + check.passed, failed + (not check.passed)
                    sign = ">" if isinstance(check, Planted) else "<="
                    print(
                        f"{family:<11} {setting:<13} {check.what:<72} {check.worst:10.2e} {sign:>2} {check.bound:7.0e}  "
                        + ("ok" if check.passed else f"FAILED {check.where}"),
                        flush=True,
                    )
            except CommandFailed as error:
                failed += 1
                print(f"{family:<11} FAILED {error}", flush=True)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
