"""Policies through the server: figures against plain formulas, nothing left behind, nothing measured twice."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from kvdata import KVCacheDataset
from kvdata.edits.address import compressed_address
from kvdata.edits.policies import KeyDiff, Oracle, Policy, Recency, Sees, Source, apply_policy
from kvdata.edits.rope import Rope
from kvdata.engines.huggingface import attention_target
from kvdata.errors import InvalidRequest, MissingKV, OtherEvaluation, StoreConflict
from kvdata.evaluation import Dropping, Row, Rows, evaluate, methods_named, open_run
from kvdata.evaluation.attention import AttentionError
from kvdata.evaluation.offline import full_key, jobs_of
from kvdata.evaluation.subject import Subject
from tests.unit.conftest import fresh_tokens
from tests.unit.tiny_model import tiny_autoencoder, tiny_engine, windows

TOKENS, FOLLOWING, KEPT = 192, 24, 96
engine_of_this_module = pytest.fixture(scope="module", name="engine")(tiny_engine)


@pytest.fixture
def dataset(engine, connection):
    """Three cached windows."""
    salt = f"evaluate-{fresh_tokens(1)[0]}"
    records = windows(3, TOKENS, FOLLOWING, 7)
    with connection.connect() as ctx:
        for record in records:
            engine.store_prefix(ctx, record["tokens"], salt)
    data = KVCacheDataset(records, connection=connection, cache_salt=salt)
    yield data
    data.close()


def method(engine, policy: Policy, revision: str = "r1") -> Dropping:
    return Dropping(policy, Rope.from_config(engine.config), 2, revision)


def test_figures_are_those_of_plain_formulas(engine, dataset, tmp_path):
    rows = Rows(tmp_path / "rows.jsonl", Row)
    evaluate(engine, dataset, [method(engine, Recency()), method(engine, Oracle())], [0.5], rows)
    sample = dataset[1]
    kv, tokens, ids = sample["kv"], sample["tokens"].tolist(), sample["continuation"]
    target = attention_target(engine.attention(kv, ids), 2)
    full = engine.continue_from(kv, ids)
    error = AttentionError(kv, engine.attention_inputs(kv, ids), Rope.from_config(engine.config))
    for policy in (Recency(), Oracle()):
        source = Source(tokens=tokens, target=target)
        smaller, _ = apply_policy(policy, kv, KEPT, Rope.from_config(engine.config), 2, source)
        logits = engine.continue_from(smaller, ids)
        row = rows[1, policy.name, "r1", 0.5]
        assert (row.kept_tokens, row.sees, row.trained) == (KEPT, policy.sees.value, False)
        assert row.stored_bytes == KEPT * dataset.context.layout.token_bytes
        assert row.nll["next"] == pytest.approx(float(cross_entropy(logits[:-1], ids[1:])), rel=1e-4)
        p, q = full[:-1].softmax(-1), logits[:-1].softmax(-1)
        assert row.kl["next"] == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-3)
        assert row.top1["next"] == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).float().mean()))
        # The passage at a quarter of the prefix: 16 tokens of cue, then 32 that are scored.
        passage = sample["tokens"][48:96]
        recalled = engine.continue_from(smaller, passage)
        expected = float(cross_entropy(recalled[15:-1], passage[16:]))
        assert row.nll["recall 25 %"] == pytest.approx(expected, rel=1e-4)
        assert set(row.nll) == set(row.kl) == set(row.top1) == {"next", "recall 25 %", "recall 75 %"}
        assert row.attention_error == pytest.approx(error(smaller), rel=1e-4)
        assert set(row.seconds) == {"inputs", "score", "write", "read"}
    assert rows[1, "recency", "r1", 0.5].seconds["inputs"] == 0
    assert rows[1, "oracle", "r1", 0.5].seconds["inputs"] > 0
    reference = rows[full_key(1)]
    assert reference.nll["next"] == pytest.approx(float(cross_entropy(full[:-1], ids[1:])), rel=1e-4)
    assert (reference.kl["next"], reference.top1["next"]) == (pytest.approx(0, abs=1e-6), 1)
    assert reference.attention_error == 0


def test_attention_error_is_that_of_the_models_own_outputs(engine, dataset):
    sample = dataset[0]
    kv, ids = sample["kv"].float(), sample["continuation"]
    rope = Rope.from_config(engine.config)
    inputs = engine.attention_inputs(kv, ids)
    error = AttentionError(kv, inputs, rope)
    outputs: list[torch.Tensor] = []
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, given: outputs.append(given[0][0]))
        for layer in engine.model.model.layers
    ]
    engine.continue_from(kv, ids)
    for hook in hooks:
        hook.remove()
    own = error._output(kv).transpose(1, 2).flatten(2)
    assert torch.allclose(own, torch.stack(outputs), atol=1e-4)
    assert error(kv) == pytest.approx(0, abs=1e-5)
    smaller, kept = apply_policy(KeyDiff(), kv, KEPT, rope, 2)
    # By hand: the kept keys at their original places, one query of one head at a time.
    layer, head, query = 1, 3, 5
    original = kv[:, layer].unflatten(-1, (2, 8))[:, kept[layer, 1], 1]
    keys = torch.cat((original[0], inputs.keys[layer, 1, : query + 1]))
    values = torch.cat((original[1], inputs.values[layer, 1, : query + 1]))
    keys[:KEPT] = rope.rerotate(original[0], kept[layer, 1], torch.arange(KEPT) + TOKENS - KEPT)
    weights = (keys @ inputs.queries[layer, head, query] / math.sqrt(8)).softmax(0)
    assert torch.allclose(error._output(smaller)[layer, head, query], weights @ values, atol=1e-4)
    change = (error._output(smaller) - error._output(kv)).flatten(1).norm(dim=1)
    assert error(smaller) == pytest.approx(float((change / error._output(kv).flatten(1).norm(dim=1)).mean()), rel=1e-5)


def test_nothing_is_left_in_the_server_but_what_was_there(engine, dataset, tmp_path):
    sample = dataset[0]
    keydiff = method(engine, KeyDiff())
    address = compressed_address(sample["tokens"].tolist(), KEPT, "keydiff", "r1", sample["salt"])
    evaluate(engine, dataset, [keydiff], [0.5], Rows(tmp_path / "first.jsonl", Row))
    assert dataset.context.lookup(*address) == 0
    assert len(dataset.coverage().hit) == 3
    smaller, _ = apply_policy(KeyDiff(), sample["kv"], KEPT, keydiff.rope, 2, Source())
    dataset.context.store(smaller, *address)  # somebody else's: an engine decodes from it
    evaluate(engine, dataset, [keydiff], [0.5], Rows(tmp_path / "second.jsonl", Row))
    assert dataset.context.lookup(*address) == KEPT
    dataset.context.delete(*address)
    dataset.context.store(smaller * 2, *address)
    with pytest.raises(StoreConflict, match="another cache"):
        evaluate(engine, dataset, [keydiff], [0.5], Rows(tmp_path / "third.jsonl", Row))


class Counting(Dropping):
    made: int = 0

    def compress(self, kv, keep, source):
        type(self).made += 1
        return super().compress(kv, keep, source)


def test_an_interrupted_run_goes_on_where_it_was(engine, dataset, tmp_path):
    class Once(Counting):
        pass

    methods = [Once(policy, Rope.from_config(engine.config), 2) for policy in (Recency(), KeyDiff())]

    def interrupted(groups, total):
        assert total == 6
        yield from groups[:3]
        raise KeyboardInterrupt

    path = tmp_path / "rows.jsonl"
    with pytest.raises(KeyboardInterrupt):
        evaluate(engine, dataset, methods, [0.5, 0.34], Rows(path, Row), interrupted)
    first = path.read_bytes()
    assert Once.made == 6
    path.write_bytes(first + b'{"window": 1, "policy": "re')  # a crash in the middle of a line
    evaluate(engine, dataset, methods, [0.5, 0.34], Rows(path, Row))
    assert Once.made == 12
    assert path.read_bytes().startswith(first)
    again = Rows(path, Row)
    keys = [(place, name, "r1", keep) for place in range(3) for name in ("recency", "keydiff") for keep in (0.5, 0.34)]
    assert all(key in again for key in [*keys, *map(full_key, range(3))])
    assert len(path.read_bytes().splitlines()) == 15
    evaluate(engine, dataset, methods, [0.5, 0.34], again)
    assert Once.made == 12


def test_models_are_asked_only_for_what_a_policy_sees(engine, dataset):
    class Asked:
        def __getattr__(self, name):
            calls.append(name)
            return getattr(engine, name)

    sample = dataset[0]
    calls: list[str] = []
    ids = sample["continuation"]
    subject = Subject(Asked(), sample["kv"], sample["tokens"], ids, ids[:5])
    source = subject.source(Sees.CACHE)
    assert source.tokens == sample["tokens"].tolist()
    assert (source.queries, source.question, source.target, calls) == (None, None, None, [])
    for _ in range(2):  # once for all policies
        queries = subject.source(Sees.QUERIES).queries
    assert calls == ["queries"]
    assert torch.allclose(queries, engine.queries(sample["tokens"]))
    assert torch.allclose(subject.source(Sees.QUESTION).question, engine.queries(ids[:5], sample["kv"]))
    future = subject.source(Sees.FUTURE)
    assert torch.allclose(future.target, attention_target(engine.attention(sample["kv"], ids), 2))
    assert future.queries is None
    assert subject.inputs_seconds(Sees.QUESTION) == subject.seconds["queries"] + subject.seconds["question"]


def test_budgets_are_whole_chunks_and_differ(engine):
    recency = method(engine, Recency())
    assert [[job.kept for job in jobs] for jobs in jobs_of([recency], [0.5, 0.34], 192, 32)] == [[96], [64]]
    for keeps, words in (([0.5, 0.45], "comes to"), ([1.0], "share"), ([0.0], "share")):
        with pytest.raises(InvalidRequest, match=words):
            jobs_of([recency], keeps, 160, 32)
    with pytest.raises(InvalidRequest, match="comes to"):
        jobs_of([recency], [0.5], 32, 32)


def test_an_autoencoder_is_measured_at_its_own_share_of_the_bytes(engine, dataset, tmp_path):
    model = tiny_autoencoder(engine)
    model.save(tmp_path / "coded.pt")
    share = round(model.ratio(TOKENS), 2)
    assert 0.5 < share < 0.7
    recency, coded = methods_named(engine.config, 2, ["recency"], autoencoders=[tmp_path / "coded.pt"])
    jobs = jobs_of([recency, coded], [0.34, share], TOKENS, 32)
    assert [[job.method.name for job in same] for same in jobs] == [["recency"], ["recency", "coded"]]
    with pytest.raises(InvalidRequest, match=r"coded makes caches of 192 tokens to 0\.63 of their bytes"):
        jobs_of([coded], [0.34], TOKENS, 32)
    rows = Rows(tmp_path / "rows.jsonl", Row)
    evaluate(engine, dataset, [recency, coded], [0.34, share], rows)
    sample = dataset[2]
    ids, restored = sample["continuation"], model(sample["kv"][None])[0].to(sample["kv"].dtype)
    row = rows[2, "coded", coded.revision, share]
    assert (row.kept_tokens, row.trained, row.sees) == (TOKENS, True, "cache")
    logits = engine.continue_from(restored, ids)
    assert row.nll["next"] == pytest.approx(float(cross_entropy(logits[:-1], ids[1:])), rel=1e-4)
    assert 0 < row.kl["next"] < 1e-3


def test_what_cannot_be_measured_says_so(engine, dataset, connection, tmp_path):
    rows = Rows(tmp_path / "rows.jsonl", Row)
    silent = KVCacheDataset([{"tokens": list(range(64))}], connection=connection)
    with pytest.raises(InvalidRequest, match="window 0 has no continuation"):
        evaluate(engine, silent, [], [], rows)
    absent = KVCacheDataset(windows(1, 64, 8, 99), connection=connection)
    with pytest.raises(MissingKV):
        evaluate(engine, absent, [], [], rows)
    for data in (silent, absent):
        data.close()
    assert not rows.path.exists()


def test_methods_have_names_of_their_own(engine):
    known = methods_named(engine.config, 2)
    assert {"random", "recency", "key-norm", "keydiff", "value-norm", "oracle"} <= {m.name for m in known}
    with pytest.raises(InvalidRequest, match="unknown policies: nonsense; known are random"):
        methods_named(engine.config, 2, ["recency", "nonsense"])
    with pytest.raises(InvalidRequest, match="two methods are named recency"):
        methods_named(engine.config, 2, ["recency", "recency"])


def test_a_folder_holds_one_evaluation(tmp_path):
    settings = {"model": "a", "chunk_tokens": 32}
    folder = open_run(tmp_path / "run", settings)
    assert open_run(folder, settings) == folder
    before = (folder / "settings.json").read_bytes()
    for other, words in (({"model": "b", "chunk_tokens": 32}, "its model is 'a', not 'b'"), ({"model": "a"}, "chunk")):
        with pytest.raises(OtherEvaluation, match=words):
            open_run(folder, other)
    assert (folder / "settings.json").read_bytes() == before
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OtherEvaluation, match="not empty"):
        open_run(tmp_path, settings)
    (folder / "settings.json").write_text("{")
    with pytest.raises(OtherEvaluation, match="not the settings"):
        open_run(folder, settings)


def test_a_line_that_is_no_row_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"window": 1}\n')
    with pytest.raises(InvalidRequest, match="line 1"):
        Rows(path, Row)
