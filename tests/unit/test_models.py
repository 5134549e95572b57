"""Several models within a budget of memory."""

import contextlib
import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from gguf_samples import write_default

from bitnet_inference.backends import load_model
from bitnet_inference.backends.sizes import estimate_bytes
from bitnet_inference.config import EngineConfig
from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.errors import FormatError, InvalidParams, NotFound, OutOfMemory, Stopped
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.llm import LLM
from bitnet_inference.models import Models

GOLDEN = Path(__file__).parents[1] / "golden"
A, B, C, D = (GOLDEN / name for name in ("bitnet-packed", "llama-f16", "llama3-bf16", "llama-partial"))
CACHE = 256
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=None, ignore_eos=True)


@functools.cache
def size(path):
    with LLM.load(path, threads=1, max_cache_tokens=CACHE) as llm:
        return llm.num_bytes


def models_of(max_bytes, **options):
    return Models(max_bytes, threads=1, max_cache_tokens=CACHE, **options)


def room_for(*paths):
    return sum(map(size, paths)) + (4 << 10)  # an estimate is a little too high


def names(models):
    return [state.path.name for state in models.loaded()]


@pytest.mark.parametrize("path", [*sorted(GOLDEN.glob("*/config.json")), None])
@pytest.mark.parametrize("options", [{}, {"cache_dtype": "int8"}, {"embedding": "int8"}, {"device": "reference"}])
def test_the_estimate_is_close(path, options):
    path = "default" if path is None else path.parent
    with LLM.load(path, threads=1, max_cache_tokens=1024, **options) as llm:
        config = EngineConfig(**options).resolve()
        checkpoint = open_checkpoint(llm.tokenizer.path)
        assert llm.num_bytes <= estimate_bytes(checkpoint, config, 1024) <= llm.num_bytes * 1.02


@pytest.mark.parametrize("options", [{}, {"quantize": "int8"}, {"head": "int8"}, {"embedding": "int8"}])
def test_the_estimate_is_close_where_types_become_float32(tmp_path, options):
    no_norms = [f"layers.{layer}.{part}_sub_norm" for layer in range(6) for part in ("attn", "mlp")]
    write_default(tmp_path / "x.gguf", "Q8_0", "Q8_0", arch="llama", drop=no_norms)
    config, checkpoint = EngineConfig(threads=1, **options).resolve(), open_checkpoint(tmp_path / "x.gguf")
    taken = load_model(checkpoint, config).num_bytes
    assert taken <= estimate_bytes(checkpoint, config, 0) <= taken * 1.02


@pytest.mark.parametrize(
    "options", [{}, {"head": "int8"}, {"embedding": "int8"}, {"head": "int6", "embedding": "int8"}]
)
def test_the_estimate_is_close_where_embeddings_are_ternary(tmp_path, options):
    write_default(tmp_path / "x.gguf", "TQ2_0", "TQ2_0")
    config, checkpoint = EngineConfig(threads=1, **options).resolve(), open_checkpoint(tmp_path / "x.gguf")
    taken = load_model(checkpoint, config).num_bytes
    assert taken <= estimate_bytes(checkpoint, config, 0) <= taken * 1.02


@pytest.mark.parametrize("options", [{"quantize": "int8"}, {"head": "int8"}, {"embedding": "int8"}])
def test_numbers_tell_of_every_rounding(options):
    with models_of(None) as exact, models_of(None, **options) as rounded:
        assert exact.numbers(A) != rounded.numbers(A)


class TestUse:
    def test_a_model_is_loaded_once_whatever_it_is_called(self, tmp_path, monkeypatch):
        (tmp_path / "link").symlink_to(A)
        with models_of(None) as models:
            with models.use(A) as first, models.use(str(tmp_path / "link")) as second:
                assert first is second and first.num_bytes == size(A)
                assert [state.num_users for state in models.loaded()] == [2]
            monkeypatch.chdir(GOLDEN)
            with models.use(A.name) as third:
                assert third is first
            with models.use() as default:
                assert default is not first and default.max_context == CACHE
            (state, _) = models.loaded()
            assert (state.path, state.num_bytes, state.num_users) == (A, size(A), 0)
            assert state.idle_s >= 0 and not state.is_loading

    def test_it_generates_as_ever(self):
        with LLM.load(B) as llm, models_of(None) as models, models.use(B) as used:
            assert used.generate([5, 6], GREEDY).token_ids == llm.generate([5, 6], GREEDY).token_ids

    def test_the_one_not_used_for_longest_goes(self):
        with models_of(room_for(A, B, C)) as models:
            for path in (A, B, C):
                models.preload(path)
            models.preload(A)
            assert names(models) == [B.name, C.name, A.name]
            models.preload(D)
            assert names(models) == [C.name, A.name, D.name]

    def test_no_more_go_than_must(self):
        with models_of(room_for(A, B, C)) as models:
            for path in (C, A, B):
                models.preload(path)
            models.preload(D)  # smaller than C
            assert names(models) == [A.name, B.name, D.name]

    def test_one_that_is_used_stays(self):
        with models_of(room_for(A, B)) as models:
            with models.use(A) as llm:
                models.preload(B)
                models.preload(D)
                assert names(models) == [A.name, D.name]
                with (
                    models.use(D),
                    pytest.raises(OutOfMemory, match="models in use leave"),
                ):
                    models.preload(B)
                assert names(models) == [A.name, D.name]  # nothing is unloaded in vain
                assert llm.generate([5], GREEDY).token_ids
            models.preload(B)

    def test_one_that_never_fits(self):
        with models_of(5) as models, pytest.raises(OutOfMemory, match=r" kB, max_bytes is 5 bytes: raise it"):
            models.preload(B)
        assert models.loaded() == []

    def test_one_whose_streams_go_on_stays(self):
        with models_of(room_for(B)) as models:
            with models.use(B) as llm:
                streams = [llm.stream([5], ENDLESS) for _ in range(200)]
            with pytest.raises(OutOfMemory, match="models in use leave"):
                models.preload(D)
            for stream in streams:
                stream.cancel()
            assert all(stream.read().finish_reason in ("cancelled", "length") for stream in streams)
            models.preload(D)
            assert names(models) == [D.name]

    def test_a_refused_request_keeps_nobody_busy(self, tmp_path):
        with LLM.load(A) as llm:
            with pytest.raises(InvalidParams) as refused:
                llm.stream([9999], ENDLESS)
            assert not llm.is_busy and refused.tb  # the error holds the request

    def test_unloaded_ones_are_closed(self):
        with models_of(room_for(B)) as models:
            with models.use(A) as llm:
                pass
            models.preload(B)
            with pytest.raises(Stopped):
                llm.generate([5], GREEDY)
        assert models.loaded() == []

    @pytest.mark.parametrize("end", [LLM.close, LLM.drain])
    def test_one_that_its_user_has_closed_is_loaded_anew(self, end):
        with models_of(room_for(A)) as models:
            with models.use(A) as closed:
                text = closed.generate([5], GREEDY).token_ids
                assert closed.is_open
                end(closed)
                with models.use(A) as llm:
                    assert not closed.is_open and llm.generate([5], GREEDY).token_ids == text
            assert [state.num_users for state in models.loaded()] == [0]
            with models.use(A) as again:
                assert again is llm

    def test_mistakes(self, tmp_path):
        for options in (
            {"max_bytes": 0},
            {"max_bytes": True},
            {"max_cache_tokens": 1.5},
            {"device": "tpu"},
            {"listener": 5},
        ):
            with pytest.raises(InvalidParams, match=next(iter(options))):
                Models(**options)
        with models_of(None) as models:
            with pytest.raises(NotFound):
                models.preload("nowhere")
            for wait_s in (-1, "1", float("nan")):
                with pytest.raises(InvalidParams, match="wait_s"), models.use(A, wait_s=wait_s):
                    pass
            with pytest.raises(FormatError):
                models.preload(tmp_path)
            assert models.loaded() == []


class Loads:
    """A `progress` that counts loads, and holds each up until `models` are as they are waited for."""

    def __init__(self, is_time, error=None):
        self.is_time, self.error, self.models, self.paths = is_time, error, None, []

    def __call__(self, done, total):
        if done == total:
            self.paths += [state.path for state in self.models.loaded() if state.num_bytes and state.is_loading]
        while not self.is_time(self.models):
            pass
        if self.error is not None:
            raise self.error


def have_users(number):
    return lambda models: sum(state.num_users for state in models.loaded()) >= number


class TestThreads:
    def test_many_wait_for_one_load(self):
        loads = Loads(have_users(4))
        with models_of(None, progress=loads) as models, ThreadPoolExecutor(4) as threads:
            loads.models = models

            def use(_):
                with models.use(A) as llm:
                    return llm, llm.generate([5], GREEDY).token_ids

            results = list(threads.map(use, range(4)))
            assert loads.paths == [A] and len({id(llm) for llm, _ in results}) == 1
            assert all(token_ids == results[0][1] for _, token_ids in results)

    def test_a_failed_load_is_told_to_all_who_wait_and_tried_again(self):
        loads = Loads(have_users(4), RuntimeError("broken"))
        with models_of(None, progress=loads) as models, ThreadPoolExecutor(4) as threads:
            loads.models = models
            for future in [threads.submit(models.preload, A) for _ in range(4)]:
                with pytest.raises(RuntimeError, match="broken"):
                    future.result()
            assert models.loaded() == []
            loads.error, loads.is_time = None, have_users(1)
            models.preload(A)
            assert names(models) == [A.name]

    def test_an_interrupted_load_is_an_error_for_the_others(self):
        loads = Loads(have_users(2), KeyboardInterrupt())
        with models_of(None, progress=loads) as models, ThreadPoolExecutor(2) as threads:
            loads.models = models
            errors = [future.exception() for future in [threads.submit(models.preload, A) for _ in range(2)]]
            assert sorted(type(error).__name__ for error in errors) == ["KeyboardInterrupt", "Stopped"]
            assert models.loaded() == []

    def test_closing_ends_requests_and_waits_for_loads(self):
        loads = Loads(have_users(1))
        models = loads.models = models_of(None, progress=loads)
        with models.use(A) as llm, ThreadPoolExecutor(3) as threads:
            stream = llm.stream([5], ENDLESS)
            has_begun = threading.Event()
            loads.is_time = lambda models: has_begun.set() or not models._is_open
            waiting = [threads.submit(models.preload, path) for path in (B, C)]
            while not (have_users(3)(models) and has_begun.is_set()):  # one loads, one waits
                pass
            models.close()
            assert [type(future.exception()) for future in waiting] == [Stopped, Stopped]
            assert models.loaded() == [] and len(loads.paths) == 2
            for call in (lambda: models.preload(A), lambda: llm.generate([5], GREEDY)):
                with pytest.raises(Stopped):
                    call()
            with contextlib.suppress(Stopped):  # it may have been quick enough
                assert stream.read().finish_reason == "length"
        models.close()

    def test_who_waits_for_room_comes_before_those_who_come_later(self):
        """Of two models that do not fit together, the one that is in use would keep the other one out for ever."""
        with models_of(room_for(B)) as models, ThreadPoolExecutor(1) as threads:
            order = []

            def use(path):
                with models.use(path, wait_s=60):
                    order.append(path)

            for _ in range(5):
                with models.use(A):
                    other = threads.submit(use, B)
                    while not models._waiting:
                        assert not other.done()
                    models.preload(A)  # who waits for nothing is let in
                use(A)
                other.result()
            assert order == [B, A] * 5

    def test_a_model_that_finds_no_room_in_time_keeps_nobody_out(self):
        with models_of(room_for(B)) as models, models.use(A):
            with pytest.raises(OutOfMemory, match="models in use leave"), models.use(B, wait_s=1e-9):
                pass
            with models.use(A, wait_s=60) as llm:
                assert llm.generate([5], GREEDY).token_ids
            with pytest.raises(OutOfMemory, match="raise it"), models_of(5) as small, small.use(A, wait_s=60):
                pass

    def test_who_waits_for_room_holds_up_no_load_that_needs_no_waiting(self):
        """Nor one of whoever uses what is in the way: both would wait for each other."""
        with models_of(room_for(A, D)) as models, ThreadPoolExecutor(1) as threads:
            with models.use(A):
                waiting = threads.submit(lambda: models.use(B, wait_s=float("inf")).__enter__())
                while not models._waiting:
                    assert not waiting.done()
                models.preload(D)
                with models.use(D), pytest.raises(OutOfMemory, match="models in use leave"):
                    models.preload(C)
                with pytest.raises(OutOfMemory, match="models in use leave no room in time"):
                    models.preload(B)  # which another waits for, and will for long
                assert not waiting.done()
            assert waiting.result(60).generate([5], GREEDY).token_ids

    def test_closing_ends_the_wait_for_room(self):
        models = models_of(room_for(B))
        with models.use(A), ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(lambda: models.use(B, wait_s=60).__enter__())
            while not models._waiting:
                assert not waiting.done()
            models.close()
            assert isinstance(waiting.exception(), Stopped)

    def test_in_any_order(self):
        """Threads that use models as they come: never over the budget, and every text is right."""
        expected = {}
        for path in (A, B, C, D):
            with LLM.load(path, threads=1) as llm:
                expected[path] = llm.generate([5, 6], GREEDY).token_ids
        models, refused, wrong = models_of(room_for(B, C)), [], []

        def work(seed):
            for step in range(25):
                path = (A, B, C, D)[(seed * 7 + step * (seed + 1)) % 4]
                try:
                    with models.use(path) as llm:
                        if llm.generate([5, 6], GREEDY).token_ids != expected[path]:
                            wrong.append(path)
                except OutOfMemory:
                    refused.append(path)
                if sum(state.num_bytes for state in models.loaded()) > models.max_bytes:
                    wrong.append("budget")

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong and len(refused) < 125
        assert all(state.num_users == 0 and not state.is_loading for state in models.loaded())
        models.close()
