"""Texts with labels by config: a tiny BERT learns as in the library's own loop, and what cannot be read is told."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from paceline.comm.virtual.communicator import run_virtual
from paceline.config import config_from_dict
from paceline.config.data_sections import RowsDataConfig
from paceline.config.sections import LoraConfig
from paceline.data.labelled_texts import labels_of
from paceline.data.registry import data_of, open_rows
from paceline.data.rows import CsvRows, JsonLines
from paceline.errors import BadSampleError, ConfigError, DataError, PacelineError
from paceline.train.assemble import build_trainer
from paceline.train.reach import find_unreachable

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "film", "a", "very", "long", "and"]
TEXTS = ["a good film", "bad", "a very very good and long film", "a bad film", "good", "very bad and long"]
ROWS = [{"text": TEXTS[n % 6], "label": "pos" if "good" in TEXTS[n % 6] else "neg"} for n in range(12)]
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts") / "bert"
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=16, **SIZES)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    inner = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = [("[CLS]", 2), ("[SEP]", 3)]
    inner.post_processor = tokenizers.processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    inner.save(str(folder / "tokenizer.json"))
    (folder.parent / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in ROWS), encoding="utf-8")
    return folder


def config_of(folder: Path, *, ranks: int = 1, strategy: str = "ddp", **data: Any) -> Any:
    path = data.pop("path", folder.parent / "rows.jsonl")
    return config_from_dict(
        {
            "model": {"kind": "hf", "path": str(folder), "task": "sequence_classification", "fresh": ["classifier"]},
            "data": {
                "kind": "jsonl",
                "path": str(path),
                "inputs": "text",
                "targets": "label",
                "context": 6,
                "shuffle": False,
                "eval_fraction": 0.0,
                **data,
            },
            "train": {"steps": 3, "global_batch": 4, "seed": 5},
            "optim": {"kind": "sgd", "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0},
            "parallel": {"ranks": ranks, "strategy": strategy, "device": "cpu"},
        }
    )


def test_a_batch_is_as_long_as_its_longest_text_and_keeps_special_tokens(made: Path) -> None:
    data = data_of(config_of(made))
    assert (data.shape.classes, data.shape.class_names, data.shape.pad_token) == (2, ("neg", "pos"), 0)
    inputs, targets = data.train.read(np.array([1, 0, 2]), 0)  # type: ignore[attr-defined]
    assert inputs.tolist() == [[2, 5, 3, 0, 0, 0], [2, 7, 4, 6, 3, 0], [2, 7, 8, 8, 4, 3]]  # the last one is cut
    assert targets.tolist() == [0, 1, 1]
    assert data.train.read(np.array([1, 4]), 0)[0].shape == (2, 3)  # type: ignore[attr-defined]


def train(comm: Any, config: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    trainer = build_trainer(config, comm)
    before = trainer.parts.engine.full_state_dict()
    losses = [[float(result.outcome.loss_sum), float(result.outcome.count)] for result in trainer.steps()]
    return losses, {"first": before["classifier.weight"], **trainer.parts.engine.full_state_dict()}


@pytest.mark.some(1)
@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 1), ("ddp", 2), ("fsdp", 2), ("zero2", 4)])
def test_it_learns_as_in_the_librarys_own_loop(made: Path, strategy: str, ranks: int) -> None:
    found = run_virtual(lambda comm: train(comm, config_of(made, ranks=ranks, strategy=strategy)), ranks)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(made / "tokenizer.json"), pad_token="[PAD]")
    model = transformers.BertForSequenceClassification.from_pretrained(made, num_labels=2)
    state = found[0][1]
    with torch.no_grad():
        model.classifier.weight.copy_(state["first"])
        model.classifier.bias.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        rows = [ROWS[4 * step + number] for number in range(4)]
        batch = tokenizer([each["text"] for each in rows], padding=True, truncation=True, max_length=6)
        tensors = {name: torch.tensor(batch[name]) for name in ("input_ids", "attention_mask")}
        targets = torch.tensor([int(each["label"] == "pos") for each in rows])
        loss = F.cross_entropy(model(**tensors).logits, targets)
        ours = [sum(each[0][step][part] for each in found) for part in (0, 1)]
        assert ours[0] / ours[1] == pytest.approx(loss.item(), abs=1e-6)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for name, value in model.state_dict().items():
        assert torch.allclose(state[name], value, atol=1e-6), name


PAIRS = [{**row, "second": TEXTS[(3 * number + 1) % 6]} for number, row in enumerate(ROWS)]


def test_pairs_of_texts_are_read_as_the_library_reads_them(made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bert"
    shutil.copytree(made, folder)
    inner = tokenizers.Tokenizer.from_file(str(made / "tokenizer.json"))
    special = {"single": "[CLS] $A [SEP]", "pair": "[CLS] $A [SEP] $B:1 [SEP]:1"}
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        **special, special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    inner.save(str(folder / "tokenizer.json"))
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in PAIRS), encoding="utf-8")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), pad_token="[PAD]")
    for context in range(5, 16):
        data = data_of(config_of(folder, path=path, text_pair="second", context=context))
        inputs, _ = data.train.read(np.arange(12), 0)  # type: ignore[attr-defined]
        texts = [[each[name] for each in PAIRS] for name in ("text", "second")]
        batch = theirs(*texts, padding=True, truncation=True, max_length=context, return_token_type_ids=True)
        assert inputs[:, 0].tolist() == batch["input_ids"]
        assert inputs[:, 1].tolist() == batch["token_type_ids"]
    config = config_of(folder, path=path, text_pair="second", context=12, ranks=2, strategy="fsdp")
    found = run_virtual(lambda comm: train(comm, config), 2)
    model = transformers.BertForSequenceClassification.from_pretrained(folder, num_labels=2)
    with torch.no_grad():
        model.classifier.weight.copy_(found[0][1]["first"])
        model.classifier.bias.zero_()
    batch = theirs(
        *([each[name] for each in PAIRS[:4]] for name in ("text", "second")), padding=True, return_token_type_ids=True
    )
    logits = model(
        **{name: torch.tensor(batch[name]) for name in ("input_ids", "attention_mask", "token_type_ids")}
    ).logits
    loss = F.cross_entropy(logits, torch.tensor([int(each["label"] == "pos") for each in PAIRS[:4]]))
    ours = [sum(each[0][0][part] for each in found) for part in (0, 1)]
    assert ours[0] / ours[1] == pytest.approx(loss.item(), abs=1e-6)


def test_frames_of_zstandard_are_read_to_the_end(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    lines, pack = b"".join(b'{"n": %d}\n' % number for number in range(100)), zstandard.ZstdCompressor().compress
    (tmp_path / "two.jsonl.zst").write_bytes(pack(lines[:300]) + pack(lines[300:]))
    assert [row["n"] for row in JsonLines(tmp_path / "two.jsonl.zst").read(np.arange(100))] == list(range(100))
    for content in (pack(lines)[:-6], b"something else"):
        (tmp_path / "cut.jsonl.zst").write_bytes(content)
        with pytest.raises(DataError, match="cut short or damaged"):
            JsonLines(tmp_path / "cut.jsonl.zst")


def test_csv_and_compressed_files_give_the_same(made: Path, tmp_path: Path) -> None:
    expected = data_of(config_of(made)).train
    lines = "".join(f'"{each["text"]}",{each["label"]}\n' for each in ROWS)
    (tmp_path / "rows.csv").write_text("text,label\n" + lines, encoding="utf-8")
    for name, kind in (("rows.csv", "csv"), ("rows.jsonl", "jsonl")):
        source = tmp_path / name if kind == "csv" else made.parent / name
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(source.read_bytes()))
        for path in (source, tmp_path / f"{name}.gz"):
            found = data_of(config_of(made, kind=kind, path=path)).train
            for index in range(12):
                one, other = (each.read(np.array([index]), 0) for each in (found, expected))  # type: ignore[attr-defined]
                assert torch.equal(one[0], other[0])
                assert torch.equal(one[1], other[1])


def told(config: Any, **row: Any) -> str:
    with pytest.raises(PacelineError) as problem:
        data_of(config).train.read(np.arange(1), 0)  # type: ignore[attr-defined]
    del row
    return str(problem.value)


def test_what_cannot_be_read_is_told(made: Path, tmp_path: Path) -> None:
    def rows(*values: Any) -> Path:
        path = tmp_path / "bad.jsonl"
        path.write_text("".join(json.dumps(each) + "\n" for each in values), encoding="utf-8")
        return path

    one = {"text": "good", "label": 0}
    assert "data.classes is not set" in told(config_of(made, path=rows(one)))
    assert "the classes are 0, 1" in told(config_of(made, path=rows({**one, "label": 2}), classes=2))
    assert "has 1 class" in told(config_of(made, path=rows({**one, "label": "x"})))
    bad = rows(one, {"text": "", "label": 1}, {"label": 1})
    data = data_of(config_of(made, path=bad, classes=2)).train
    for index, words in ((1, "a text has words"), (2, "it has no 'text'")):
        with pytest.raises(BadSampleError, match=words):
            data.read(np.array([index]), 0)  # type: ignore[attr-defined]
    skipping = data_of(config_of(made, path=bad, classes=2, on_bad="skip")).train
    with pytest.warns(UserWarning, match="it does not count"):
        inputs, targets = skipping.read(np.array([0, 1]), 0)  # type: ignore[attr-defined]
    assert (inputs.tolist(), targets.tolist()) == ([[2, 4, 3], [0, 0, 0]], [0, -100])
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"a": 1}\n' * 50)[:-8])
    with pytest.raises(DataError, match="cannot be read"):
        data_of(config_of(made, path=tmp_path / "cut.jsonl.gz"))


def test_a_first_row_that_cannot_be_read_is_told_or_left_out(made: Path, tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    good = [json.dumps(each) for each in ROWS[:3]]
    path.write_text("\n".join(["{no json", '{"label": "pos"}', *good]) + "\n", encoding="utf-8")
    with pytest.raises(BadSampleError, match="line 1 cannot be used"):
        data_of(config_of(made, path=path)).train.read(np.array([0]), 0)  # type: ignore[attr-defined]
    with pytest.warns(UserWarning, match="it does not count"):
        losses, state = run_virtual(
            lambda comm: train(comm, config_of(made, path=path, on_bad="skip", shuffle=False)), 1
        )[0]
    assert losses[0][1] == 2.0  # of four rows two count
    assert all(bool(value.isfinite().all()) for value in state.values())  # padding alone is no nan


def test_classes_are_those_of_all_rows_that_can_be_read(tmp_path: Path) -> None:
    """Rows are read many at a time; one that cannot be read takes no other with it."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"label": "b"}\n{"label": "c"}\nnot JSON\n{"label": null}\n{"label": "a"}\n')
    assert labels_of(JsonLines(path), "label") == ["a", "b", "c"]


def test_cells_of_a_csv_file_are_numbers_where_people_write_them_so(tmp_path: Path) -> None:
    cells = ["1", "-2", "1.5", "1e3", ".5", "1_000", "nan", "inf", "0x1", "", "٣", "text"]
    (tmp_path / "cells.csv").write_text("a\n" + "".join(f'"{each}"\n' for each in cells), encoding="utf-8")
    rows = CsvRows(tmp_path / "cells.csv")
    found = [each["a"] for each in rows.read(np.arange(len(rows)))]
    assert found == [1, -2, 1.5, 1000.0, 0.5, "1_000", "nan", "inf", "0x1", "", "٣", "text"]


def test_a_tokenizer_that_pads_otherwise_is_refused(made: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(made, other)
    settings = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**settings, "pad_token_id": 3}))
    with pytest.raises(ConfigError, match="pad_token_id = 3"):
        build_trainer(config_of(other, path=made.parent / "rows.jsonl"), run_virtual(lambda comm: comm, 1)[0])


def refused(config: Any) -> list[str]:
    return [str(each) for each in find_unreachable(config)]


def test_a_folder_that_is_not_there_is_told_once(made: Path, tmp_path: Path) -> None:
    """Whoever reads the config says that there is no folder; the library's words on it say nothing more."""
    other = tmp_path / "other"
    shutil.copytree(made, other)
    config = config_of(other, path=made.parent / "rows.jsonl", tokenizer=str(made))
    shutil.rmtree(other)
    assert not [each for each in refused(config) if "transformers" in each]


def test_a_context_that_the_model_lacks_names_its_key(made: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(made, other)
    settings = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**settings, "max_position_embeddings": 4}))
    with pytest.raises(ConfigError, match=r"set data\.context to what the model has"):
        build_trainer(config_of(other, path=made.parent / "rows.jsonl"), run_virtual(lambda comm: comm, 1)[0])


def test_config_check_finds_what_a_start_refuses(made: Path, tmp_path: Path) -> None:
    assert refused(config_of(made)) == []
    bare = tmp_path / "bare"
    shutil.copytree(made, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    without = config_of(bare, path=made.parent / "rows.jsonl")
    (missing,) = refused(without)
    assert missing == told(without)
    assert "is text, and there is no tokenizer" in missing
    numbers = tmp_path / "numbers.jsonl"
    numbers.write_text('{"text": [1, 2], "label": 0}\n', encoding="utf-8")
    beside = config_of(made, path=numbers, classes=2, tokenizer=str(made))
    assert refused(beside) == [told(beside)]
    assert "data.tokenizer is set, and 'text'" in refused(beside)[0]
    (found,) = refused(config_of(made, ranks=2).with_values("parallel", tensor=2))
    assert "cannot be split" in found or "no tensor-parallel plan" in found
    (found,) = refused(config_of(made, ranks=2).with_values("parallel", pipeline=2))
    assert "cannot be cut into stages" in found
    (found,) = refused(config_of(made).with_values("model", lora=LoraConfig(rank=2, targets=["no"])))
    assert "fits no linear layer" in found
    (found,) = refused(config_of(made).with_values("model", task="causal_lm", fresh=[]))
    assert "missing: cls.predictions" in found
    (found,) = refused(config_of(made).with_values("model", task="image_classification"))
    assert "for a bert" in found
    (found,) = refused(config_of(made, context=17))
    assert "max_position_embeddings = 16" in found


@pytest.mark.parametrize(
    ("key", "name", "fix"), [("targets", "lable", "did you mean label?"), ("inputs", "words", "set data.inputs")]
)
def test_a_field_that_no_row_has_is_named_with_those_of_the_first_row(
    key: str, name: str, fix: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a", "label": "no"}\n{"text": "b", "label": "yes"}\n')
    data = {"kind": "jsonl", "path": str(path), "inputs": "text", "targets": "label", key: name}
    config = config_from_dict({"model": {"kind": "mlp"}, "data": data, "train": {"steps": 1}})
    assert isinstance(config.data, RowsDataConfig)
    with pytest.raises(DataError) as told:
        open_rows(config.data, config.data.path)
    what, rule, found = str(told.value).splitlines()
    assert what == f"data.{key} = {name!r}, and no row of {str(path)!r} has it"
    assert (rule.strip(), found.strip()) == ("the first row has 'text', 'label'", fix)
