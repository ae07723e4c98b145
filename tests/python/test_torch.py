"""torch tensors on the CPU, as they are: no copies, their own bfloat16 and fp8."""

import weakref

import folio
import numpy as np
import pytest

import problems

torch = pytest.importorskip("torch", reason="torch is not installed")


def as_torch(array):
    """A torch tensor over the same memory; numpy's bfloat16 goes by its bits."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view("uint16")).view(torch.bfloat16)
    return torch.from_numpy(array)


@pytest.mark.parametrize("dtype", problems.DTYPES)
def test_run_over_tensors(dtype):
    problem = problems.make(dtype, "mixed")
    exact = problem.exact()
    out, lse = problem.outputs()
    results = as_torch(out), as_torch(lse)
    problem.q, problem.k, problem.v = map(as_torch, (problem.q, problem.k, problem.v))
    assert folio.TensorView(problem.q).data == problem.q.data_ptr()
    problems.run(problem, out=results[0], lse=results[1])
    problem.q, problem.k = (half.float().numpy() for half in (problem.q, problem.k))
    problems.assert_close(problem, out, lse, exact)


def test_types():
    for name, dtype in (("bfloat16", folio.bfloat16), ("float16", folio.float16)):
        assert folio.TensorView(torch.zeros(3, dtype=getattr(torch, name))).dtype == dtype
    bits = torch.zeros(3, dtype=torch.float8_e4m3fn).view(torch.uint8)
    assert folio.TensorView(bits, folio.float8_e4m3fn).dtype == folio.float8_e4m3fn


def test_gradients_are_refused():
    with pytest.raises(folio.InvalidArgument, match="grad"):
        folio.TensorView(torch.zeros(3, requires_grad=True))


class ByMethods(torch.Tensor):
    """A tensor whose type has no exchange functions, as in older versions of torch."""

    __dlpack_c_exchange_api__ = None


@pytest.mark.parametrize("kind", [torch.Tensor, ByMethods, torch.nn.Parameter])
def test_both_ways_of_exporting(kind):
    tensor = torch.arange(24, dtype=torch.float32).view(2, 3, 4)[:, 1:, ::2]
    tensor = tensor.as_subclass(kind) if kind is not torch.nn.Parameter else kind(tensor, requires_grad=False)
    view = folio.TensorView(tensor)
    assert (view.data, view.shape, view.strides) == (tensor.data_ptr(), (2, 2, 2), (12, 4, 2))
    assert view.writable and view.dtype == folio.float32
    assert folio.TensorView(torch.zeros(3, dtype=torch.bfloat16).as_subclass(kind)).dtype == folio.bfloat16


@pytest.mark.parametrize("kind", [torch.Tensor, ByMethods])
def test_a_view_keeps_the_memory_and_lets_it_go(kind):
    memory = np.zeros(8, np.float32)
    alive = weakref.ref(memory)
    view = folio.TensorView(torch.from_numpy(memory).as_subclass(kind))
    del memory
    assert alive() is not None
    del view
    assert alive() is None


def test_tensors_that_are_not_what_their_memory_is():
    negated = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    with pytest.raises(folio.InvalidArgument, match="negated lazily"):
        folio.TensorView(negated)
    assert folio.TensorView(negated.resolve_neg()).shape == (2,)
    with pytest.raises(folio.InvalidArgument, match="layout other than torch.strided"):
        folio.TensorView(torch.eye(3).to_sparse())
    with pytest.raises(folio.InvalidArgument, match="array: expected an array, got a torch.Tensor"):
        folio.TensorView(torch.zeros(3, device="meta"))
    with pytest.raises(folio.InvalidArgument, match="a shape but no memory"):
        folio.TensorView(torch._efficientzerotensor(3))
