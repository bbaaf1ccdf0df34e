"""BERT, T5 and fill-in-the-middle samples: what is hidden can be put back, and draws depend on nothing but the seed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_corpora import ENDINGS, SENTINELS, WORDS, sentence_dataset, write_tokenizer

from contracts.errors import ConfigError, InputError
from preprocessing.config import IndexConfig
from preprocessing.dataset.indexed_dataset import PairWriter
from preprocessing.dataset.token_dataset import TokenDataset
from preprocessing.samples.bert import NO_LABEL, BertSamples, mask_tokens
from preprocessing.samples.fim import FimSamples, rearrange
from preprocessing.samples.index import build_index
from preprocessing.samples.objectives import BertConfig, FimConfig, T5Config
from preprocessing.samples.opening import open_causal_samples, open_samples
from preprocessing.samples.special_tokens import FimTokens, bert_tokens
from preprocessing.samples.t5 import T5Samples, noise_mask
from preprocessing.samples.t5_lengths import lengths_for_encoder, lengths_of_window


@pytest.fixture(scope="module")
def _dataset(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    return sentence_dataset(tmp_path_factory.mktemp("sentences") / "data", documents=120)


def built(folder: Path, dataset: TokenDataset, **settings: Any) -> dict[str, Any]:
    notes: list[str] = []
    summary = build_index(IndexConfig(**settings), [dataset], folder, note=notes.append)
    return {**summary, "notes": notes}


def originals(tokens: Any, labels: Any) -> Any:
    return np.where(labels == NO_LABEL, tokens, labels)


@pytest.mark.parametrize("pairs", ["nsp", "sop"])
@pytest.mark.parametrize("masking", ["token", "whole_word", "span"])
def test_bert_rows_are_two_segments_of_whole_sentences(
    tmp_path: Path, _dataset: TokenDataset, pairs: str, masking: str
):
    bert = BertConfig(pairs=pairs, masking=masking)  # type: ignore[arg-type]
    built(tmp_path, _dataset, objective="bert", seq_length=96, bert=bert)
    samples = BertSamples(tmp_path, "train", [_dataset])
    ids = bert_tokens(_dataset.tokenizer)
    batch = samples.batch(range(len(samples)))
    assert batch.tokens.shape == (len(samples), 96) and len(samples) > 40
    text = originals(batch.tokens, batch.labels)
    stream = (_dataset.document(number).tolist() for number in range(_dataset.num_documents))
    joined = [" ".join(map(str, document)) for document in stream]
    others = 0
    for row in range(len(samples)):
        size = int(batch.is_token[row].sum())
        assert (text[row, size:] == ids.pad).all() and not batch.is_token[row, size:].any()
        seps = np.flatnonzero(text[row, :size] == ids.sep)
        assert text[row, 0] == ids.cls and len(seps) == 2 and seps[1] == size - 1
        a, b = text[row, 1 : seps[0]], text[row, seps[0] + 1 : seps[1]]
        assert (
            batch.token_types[row, : seps[0] + 1].max() == 0 and batch.token_types[row, seps[0] + 1 : size].min() == 1
        )
        first, second = (b, a) if batch.is_other[row] and pairs == "sop" else (a, b)
        together = " ".join(map(str, [*first.tolist(), *second.tolist()]))
        is_consecutive = any(together in document for document in joined)
        others += int(batch.is_other[row])
        assert is_consecutive != (bool(batch.is_other[row]) and pairs == "nsp")
    assert 0.3 < others / len(samples) < 0.7


def test_bert_labels_are_a_seventh_of_the_tokens_and_mostly_masked(tmp_path: Path, _dataset: TokenDataset):
    built(tmp_path, _dataset, objective="bert", seq_length=96, samples=3000)
    samples = BertSamples(tmp_path, "train", [_dataset])
    ids = bert_tokens(_dataset.tokenizer)
    batch = samples.batch(range(3000))
    is_label = batch.labels != NO_LABEL
    assert is_label.sum() / batch.is_token.sum() == pytest.approx(0.15, abs=0.02)
    shown = batch.tokens[is_label]
    assert (shown == ids.mask).mean() == pytest.approx(0.8, abs=0.02)
    assert (shown == batch.labels[is_label]).mean() == pytest.approx(0.1, abs=0.02)
    assert not np.isin(batch.labels[is_label], [ids.cls, ids.sep, ids.pad]).any()
    assert np.isin(shown[shown != ids.mask], ids.ordinary).all()


def test_whole_words_are_masked_together(tmp_path: Path, _dataset: TokenDataset):
    built(tmp_path, _dataset, objective="bert", seq_length=96, bert=BertConfig(masking="whole_word"))
    samples = BertSamples(tmp_path, "train", [_dataset])
    batch = samples.batch(range(len(samples)))
    text = originals(batch.tokens, batch.labels)
    endings = {_dataset.tokenizer.vocab[name] for name in ENDINGS}
    is_label = batch.labels != NO_LABEL
    for row in range(len(samples)):
        for place in range(1, 96):
            if int(text[row, place]) in endings and batch.is_token[row, place]:
                assert is_label[row, place] == is_label[row, place - 1]


def test_spans_of_one_fate_are_longer_than_words(_dataset: TokenDataset):
    ids = bert_tokens(_dataset.tokenizer)
    words = np.array([_dataset.tokenizer.vocab[name] for name in WORDS])
    tokens = np.concatenate([[ids.cls], np.tile(words, 10), [ids.sep]])
    runs = []
    for seed in range(50):
        _, labels = mask_tokens(tokens, BertConfig(masking="span"), ids, np.random.default_rng(seed))
        edges = np.diff(np.concatenate([[0], (labels != NO_LABEL).astype(int), [0]]))
        runs += (np.flatnonzero(edges < 0) - np.flatnonzero(edges > 0)).tolist()
        assert (labels != NO_LABEL).sum() == round(len(tokens) * 0.15)
    assert 2.5 < np.mean(runs) < 6 and max(runs) > 6


def test_roberta_rows_are_windows_of_the_packed_text(tmp_path: Path, _dataset: TokenDataset):
    built(tmp_path, _dataset, objective="bert", seq_length=50, bert=BertConfig(pairs="none"))
    samples = BertSamples(tmp_path, "train", [_dataset])
    batch = samples.batch(range(len(samples)))
    assert batch.is_token.all() and not batch.is_other.any() and batch.token_types.max() == 0
    assert len(samples) == _dataset.num_tokens // 48
    text = originals(batch.tokens, batch.labels)[:, 1:-1]
    counts = np.bincount(text.reshape(-1), minlength=130)
    assert (counts <= np.bincount(np.array(_dataset.shards[0].tokens), minlength=130)).all()


def test_bert_refuses_documents_that_were_not_divided_into_sentences(tmp_path: Path):
    write_tokenizer(tmp_path / "data" / "tokenizer")
    writer = PairWriter(tmp_path / "data" / "data-00000", np.dtype("<u2"))
    writer.append(np.zeros(30, np.uint16), np.array([10, 20]))
    writer.finish()
    with pytest.raises(InputError, match=r"none of 2 documents has two sentences.*ingest\.sentences"):
        built(tmp_path / "i", TokenDataset(tmp_path / "data"), objective="bert", seq_length=32)


def test_a_bert_blend_repeats_and_splits_by_document(tmp_path: Path, _dataset: TokenDataset):
    found = built(tmp_path, _dataset, objective="bert", seq_length=64, samples=2000, split="80,20,0", valid_samples=50)
    assert found["train_samples"] >= 2000 and found["valid_samples"] >= 50
    assert any("data repeat" in note for note in found["notes"])
    assert any("are left out" in note for note in found["notes"])
    firsts = [set(np.load(tmp_path / f"{name}_sentence_index.npy")[:, 0].tolist()) for name in ("train", "valid")]
    assert max(firsts[0]) < min(firsts[1])


def test_t5_rows_put_together_give_the_window(tmp_path: Path, _dataset: TokenDataset):
    built(tmp_path, _dataset, objective="t5", seq_length=64)
    samples = T5Samples(tmp_path, "train", [_dataset])
    vocab = _dataset.tokenizer.vocab
    sentinels = [vocab[name] for name in SENTINELS]
    batch = samples.batch(range(len(samples)))
    windows = samples.windows.tokens(range(len(samples)))
    assert batch.encoder_tokens.shape[1] <= 64 and batch.encoder_tokens.shape[1] == samples.lengths.encoder
    for row in range(len(samples)):
        spans: dict[int, list[int]] = {}
        for token in batch.labels[row, :-1].tolist():
            if token in sentinels:
                spans[token] = []
            else:
                spans[next(reversed(spans))].append(token)
        assert list(spans) == sentinels[: samples.lengths.spans] and all(spans.values())
        text = [item for token in batch.encoder_tokens[row, :-1].tolist() for item in spans.get(token, [token])]
        np.testing.assert_array_equal(text, windows[row])
    eos = vocab["<|endoftext|>"]
    assert (batch.encoder_tokens[:, -1] == eos).all() and (batch.labels[:, -1] == eos).all()
    np.testing.assert_array_equal(batch.decoder_tokens[:, 1:], batch.labels[:, :-1])


def test_t5_windows_share_no_token(tmp_path: Path, _dataset: TokenDataset):
    built(tmp_path, _dataset, objective="t5", seq_length=64)
    windows = T5Samples(tmp_path, "train", [_dataset]).windows
    assert windows.num_samples == _dataset.num_tokens // windows.row_tokens
    order = np.argsort(windows.index.array(0, "shuffle_index"))
    read = windows.tokens(order).reshape(-1)
    units = windows.index.array(0, "document_index").tolist()
    stream = np.concatenate([_dataset.sequence(unit) for unit in units])
    np.testing.assert_array_equal(read, stream[: len(read)])


def test_lengths_are_those_of_the_paper():
    # T5's own arithmetic for 512 encoder tokens: a window of 568 tokens, 114 decoder tokens.
    lengths = lengths_for_encoder(512, T5Config())
    assert (lengths.window, lengths.encoder, lengths.decoder) == (568, 512, 114)
    with pytest.raises(ConfigError, match="too short"):
        lengths_for_encoder(2, T5Config())


def test_noise_has_the_density_and_the_spans_asked_for():
    lengths = lengths_of_window(100, T5Config(noise_density=0.3, mean_span_length=5))
    places = np.zeros(100)
    for seed in range(300):
        mask = noise_mask(lengths, np.random.default_rng(seed))
        places += mask
        assert mask.sum() == 30 and (np.diff(mask.astype(int)) == 1).sum() == 6
        assert not mask[0] and mask[-1]
    assert places[20:80].std() < 30


def test_too_few_sentinels_are_refused_before_anything_is_built(tmp_path: Path, _dataset: TokenDataset):
    with pytest.raises(ConfigError, match="only 20 sentinels"):
        built(tmp_path / "i", _dataset, objective="t5", seq_length=400, t5=T5Config(mean_span_length=1))
    assert not (tmp_path / "i").exists()


MARKS = FimTokens(1001, 1002, 1003)


def undone(tokens: list[int]) -> list[int]:
    """Put a rearranged document together again."""
    if tokens[:2] == [1001, 1003]:
        suffix, rest = tokens[2 : tokens.index(1002)], tokens[tokens.index(1002) + 1 :]
        return rest + suffix
    if tokens[0] != 1001:
        return tokens
    s, m = tokens.index(1003), tokens.index(1002)
    return tokens[1:s] + tokens[m + 1 :] + tokens[s + 1 : m]


@pytest.mark.parametrize("spm_rate", [0.0, 1.0])
def test_a_rearranged_document_can_be_put_together_again(spm_rate: float):
    for seed in range(60):
        row = np.concatenate([np.arange(1, 30), [0], np.arange(30, 50), [0], np.full(40, 7)])
        found = rearrange(row, 0, FimConfig(rate=1, spm_rate=spm_rate), MARKS, np.random.default_rng(seed))
        assert len(found) == len(row)
        first = found[: found.tolist().index(0)].tolist()
        assert first[:2] == [1001, 1003] if spm_rate == 1 else first[0] == 1001
        assert undone(first) == list(range(1, 30))


def test_fim_rows_are_causal_rows_with_some_documents_rearranged(tmp_path: Path, _dataset: TokenDataset):
    built(tmp_path / "fim", _dataset, objective="fim", seq_length=64, fim=FimConfig(rate=0.5))
    built(tmp_path / "causal", _dataset, seq_length=64)
    fim, causal = (open_causal_samples(tmp_path / name, "train", [_dataset]) for name in ("fim", "causal"))
    assert isinstance(fim, FimSamples)
    rows, plain = fim.tokens(range(len(fim))), causal.tokens(range(len(causal)))
    assert rows.shape == plain.shape
    share = (rows != plain).any(axis=1).mean()
    assert 0.4 < share < 1
    assert fim.documents_of(3) == causal.documents_of(3)


@pytest.mark.parametrize(("objective", "name"), [("bert", "tokens"), ("t5", "labels"), ("fim", "")])
def test_a_sample_is_the_same_in_any_batch(tmp_path: Path, _dataset: TokenDataset, objective: str, name: str):
    built(tmp_path, _dataset, objective=objective, seq_length=64)
    samples: Any = open_samples(tmp_path, "train", [_dataset])
    read = (lambda ids: getattr(samples.batch(ids), name)) if name else samples.tokens
    whole = read(range(20))
    np.testing.assert_array_equal(whole[[7, 3, 15]], read([7, 3, 15]))
    with pytest.raises(IndexError):
        read([10**6])


def test_each_objective_is_read_by_its_own(tmp_path: Path, _dataset: TokenDataset):
    built(tmp_path, _dataset, objective="bert", seq_length=64)
    with pytest.raises(ConfigError, match="index of bert samples; t5 is needed here"):
        T5Samples(tmp_path, "train", [_dataset])
    with pytest.raises(ConfigError, match="a causal model needs"):
        open_causal_samples(tmp_path, "train", [_dataset])


def test_a_tokenizer_without_the_tokens_is_named(tmp_path: Path, _dataset: TokenDataset):
    from ingest_cases import CASES

    (tmp_path / "data").mkdir()
    for suffix in (".bin", ".idx"):
        (tmp_path / "data" / f"d{suffix}").write_bytes((_dataset.path / f"data-00000{suffix}").read_bytes())
    (tmp_path / "data" / "tokenizer").symlink_to(CASES / "_tokenizers" / "byte257")
    dataset = TokenDataset(tmp_path / "data")
    for objective, missing in (("bert", r"\[CLS\]"), ("t5", "<extra_id_0>"), ("fim", "fim_prefix")):
        with pytest.raises(ConfigError, match=missing):
            built(tmp_path / objective, dataset, objective=objective, seq_length=64)
