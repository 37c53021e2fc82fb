"""The loss that never holds the logits, on a GPU: the kernel against float64, the walk, compiled models, whole runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kept_records import Kept
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from paceline.comm.solo import SoloCommunicator
from paceline.config import config_from_dict
from paceline.models.gpt import GPT, gpt_config
from paceline.models.head_loss import head_loss
from paceline.train.assemble import build_trainer
from paceline.train.loss import CrossEntropy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
VOCABULARIES = [1, 11, 8192, 8193, 50304]


def draw(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(shape[0])
    return (scale * torch.randn(*shape, generator=generator, device="cuda")).to(dtype)


def draw_targets(rows: int, vocabulary: int) -> Tensor:
    targets = torch.arange(rows, device="cuda") * 7919 % vocabulary
    targets[1::5] = -100
    return targets


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_gives_what_float64_gives(dtype: torch.dtype, vocabulary: int, smoothing: float) -> None:
    from paceline.models.head_kernel import go_over_on_gpu

    logits, targets = draw(37, vocabulary, dtype=dtype, scale=4.0), draw_targets(37, vocabulary)
    wide = logits.double().requires_grad_()
    expected = F.cross_entropy(wide, targets, reduction="none", label_smoothing=smoothing)
    expected.sum().backward()
    assert wide.grad is not None
    hits = (logits.argmax(-1) == targets).long()
    for is_trained in (False, True):
        losses, found = torch.empty(37, device="cuda"), torch.empty(37, dtype=torch.int64, device="cuda")
        before = logits.clone()
        go_over_on_gpu(logits, targets, losses, found, ignored=-100, smoothing=smoothing, is_trained=is_trained)
        torch.testing.assert_close(losses.double(), expected.detach(), rtol=2e-5, atol=2e-5)
        assert torch.equal(found, hits)
        assert is_trained or torch.equal(logits, before)
    torch.testing.assert_close(logits.double(), wide.grad, rtol=2 * torch.finfo(dtype).eps, atol=2e-6)


@pytest.mark.parametrize("rows", [1, 64, 300, 4096])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_sum_and_gradients_are_those_of_float64(dtype: torch.dtype, rows: int) -> None:
    hidden = draw(1000, 128, dtype=dtype, scale=0.1).requires_grad_()
    weight = draw(9001, 128, dtype=dtype).requires_grad_()
    targets = draw_targets(1000, 9001)
    total, correct = head_loss(hidden, weight, targets, rows=rows, counts=True)
    found = torch.autograd.grad(total * 0.5, [hidden, weight])
    wide = [each.detach().double().requires_grad_() for each in (hidden, weight)]
    logits = F.linear(*wide)
    expected = F.cross_entropy(logits, targets, reduction="sum")
    theirs = torch.autograd.grad(expected * 0.5, wide)
    exact = dtype == torch.float64
    rough = 1e-12 if exact else 4e-3 if dtype == torch.float32 else 4e-2  # of the largest: float32 may be TF32
    torch.testing.assert_close(total.double(), expected.detach(), rtol=1e-12 if exact else 1e-3, atol=0)
    assert abs(int(correct) - int((logits.argmax(-1) == targets).sum())) <= (0 if exact else 5)
    for ours, other in zip(found, theirs, strict=True):
        assert ours.dtype == dtype
        assert float((ours.double() - other).abs().max() / other.abs().max()) < rough


def test_chunks_of_halves_are_added_in_float32() -> None:
    """Many chunks give a gradient of the weight as near to float64 as one chunk does."""
    hidden, weight = draw(4096, 64, dtype=torch.bfloat16), draw(8192, 64, dtype=torch.bfloat16).requires_grad_()
    targets = draw_targets(4096, 8192)
    errors = []
    for rows in (64, 4096):
        (found,) = torch.autograd.grad(head_loss(hidden, weight, targets, rows=rows), weight)
        wide = weight.detach().double().requires_grad_()
        logits = F.linear(hidden, weight).double() + F.linear(hidden.double(), wide - wide.detach())
        (expected,) = torch.autograd.grad(F.cross_entropy(logits, targets, reduction="sum"), wide)
        errors.append(float((found.double() - expected).norm() / expected.norm()))
    assert errors[0] < 1.2 * errors[1] < 0.01


def test_a_target_out_of_range_makes_the_sum_nan() -> None:
    hidden, weight, targets = draw(8, 16), draw(32, 16), draw_targets(8, 32)
    targets[3] = 32
    with torch.no_grad():
        assert torch.isnan(head_loss(hidden, weight, targets))


def test_the_logits_of_all_rows_are_never_there() -> None:
    hidden = draw(16384, 64, dtype=torch.bfloat16).requires_grad_()
    weight = draw(32768, 64, dtype=torch.bfloat16).requires_grad_()
    targets = draw_targets(16384, 32768)
    head_loss(hidden, weight, targets, rows=1024).backward()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    head_loss(hidden, weight, targets, rows=1024).backward()
    used = torch.cuda.max_memory_allocated() - before
    assert used < 0.15 * 16384 * 32768 * 2  # of the logits in bf16


@pytest.mark.filterwarnings("ignore")  # of torch's compiler
@pytest.mark.parametrize("tied", [True, False])
def test_a_compiled_gpt_has_one_graph_and_the_same_loss(tied: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    config = gpt_config(layers=2, heads=4, width=128, context=64, vocab_size=8320, tied=tied)
    model = GPT(config).cuda().bfloat16()
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(model.forward, backend=counter)
    for samples in (8, 5, 3):
        tokens = torch.arange(samples * 64, device="cuda").reshape(samples, 64) % 8320
        targets = (tokens * 31 + 7) % 8320
        for each in (tokens, targets):
            torch._dynamo.maybe_mark_dynamic(each, 0)
        found: list[Any] = []
        for run in (compiled, model.forward):
            model.zero_grad()
            total = run(tokens, targets=targets)
            total.backward()
            found.append([total.detach(), *(p.grad.float() for p in model.parameters() if p.grad is not None)])
        torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-3, atol=0)
        for ours, theirs in zip(*found, strict=True):
            assert float((ours - theirs).norm()) <= 0.1 * float(theirs.norm()) + 1e-6
    assert counter.frame_count == 1
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16_master"])
@pytest.mark.parametrize("compiles", [False, True])
def test_a_run_with_it_has_the_losses_of_one_without(precision: str, compiles: bool) -> None:
    def losses(fused: Any) -> list[float]:
        torch._dynamo.reset()
        values = {
            "model": {"kind": "gpt", "layers": 2, "heads": 4, "width": 64, "context": 32, "compile": compiles},
            "data": {"kind": "synthetic_tokens", "samples": 64, "context": 32, "vocab_size": 8192},
            "train": {"steps": 4, "global_batch": 16, "precision": precision, "fused_loss": fused},
        }
        sink = Kept()
        trainer = build_trainer(config_from_dict(values), SoloCommunicator(torch.device("cuda")), sink=sink)
        assert isinstance(trainer.parts.loss, CrossEntropy)
        assert trainer.parts.loss.is_fused is (fused == "auto")
        trainer.run()
        return [record.loss_sum for record in sink.steps]

    assert losses("auto") == pytest.approx(losses(False), rel=5e-3)
