"""Too little host memory: said with numbers, and not taken for too little GPU memory."""

from __future__ import annotations

import pytest
import torch
from training import assert_same, make_params, set_grads

from torch_offload import host, offload, offload_stats
from torch_offload.failure import half_way
from torch_offload.host import HostStore

CPU = torch.device("cpu")


def too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(host, "available_host_bytes", lambda: 10_000)


def too_little_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(host, "available_host_bytes", lambda: 10_000)


def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def mmap(*args: object, **kwargs: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(host.mmap, "mmap", mmap)


@pytest.mark.parametrize("cause", [too_little, too_little_for_all_ranks, refused])
def test_batch_size_finders_do_not_try_a_smaller_batch(monkeypatch, cause):
    from accelerate.utils import find_executable_batch_size
    from accelerate.utils.memory import should_reduce_batch_size
    from lightning.pytorch.utilities.memory import is_oom_error

    params = make_params(CPU)
    optimizer = offload(torch.optim.AdamW(params))
    tried = []

    @find_executable_batch_size(starting_batch_size=64)
    def fit(batch_size: int) -> None:
        tried.append(batch_size)
        set_grads(params, 0)
        optimizer.step()

    with monkeypatch.context() as patch:
        cause(patch)
        with pytest.raises(MemoryError, match=r"optimizer state needs [\d,]+ bytes") as caught:
            fit()
    assert tried == [64]
    # Launchers raise what a rank raised again, as text in an error of their own.
    for error in (caught.value, RuntimeError(str(caught.value))):
        assert not is_oom_error(error)
        assert not should_reduce_batch_size(error)
    fit()  # nothing has changed, so there is nothing to repair
    assert offload_stats(optimizer).host_bytes > 0


def test_the_refusal_after_a_step_without_gpu_memory_is_no_lack_of_it():
    """A smaller batch would not help: a checkpoint has to be loaded."""
    from accelerate.utils.memory import should_reduce_batch_size
    from lightning.pytorch.utilities.memory import is_oom_error

    (param,) = make_params(CPU, shapes=((3,),))
    cause = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    reason = half_way(cause, [{"params": [param]}], [param])
    assert "half-way (OutOfMemoryError)" in reason
    assert not is_oom_error(RuntimeError(reason))
    assert not should_reduce_batch_size(RuntimeError(reason))
    assert "half-way (RuntimeError: boom)" in half_way(RuntimeError("boom"), [], [])


def test_what_the_system_refuses_names_the_limit():
    """More than there are addresses, where nobody knows how much is free."""
    store = HostStore(CPU, False, lambda: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "available_host_bytes", lambda: None)
        with pytest.raises(MemoryError, match=r"the system refused them: .* \(ulimit -v\)"):
            store.allocate([2**20, 2**60])
    assert store.num_bytes == 0


def test_too_little_memory_for_a_checkpoint_changes_nothing(monkeypatch):
    plain_params, params = make_params(CPU), make_params(CPU)
    plain = torch.optim.AdamW(plain_params)
    for step in range(2):
        set_grads(plain_params, step)
        plain.step()
    optimizer = offload(torch.optim.AdamW(params))
    with monkeypatch.context() as patch:
        too_little(patch)
        with pytest.raises(MemoryError, match="bytes are available"):
            optimizer.load_state_dict(plain.state_dict())
    assert not optimizer.state
    optimizer.load_state_dict(plain.state_dict())
    with monkeypatch.context() as patch:
        too_little(patch)
        optimizer.load_state_dict(plain.state_dict())  # goes to the memory that it has
    with torch.no_grad():
        for param, value in zip(params, plain_params, strict=True):
            param.copy_(value)
    assert_same((plain_params, plain), (params, optimizer))
