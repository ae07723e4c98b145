"""torch tensors on the CPU, as they are: no copies, their own bfloat16 and fp8."""

import folio
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
