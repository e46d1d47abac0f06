"""What `kvxfer.kernels` offers, and that it is there without Triton and without a GPU."""

import inspect
import subprocess
import sys

import kvxfer.kernels
import kvxfer.kernels.reference

# Importing Triton fails, as in a CPU install; the torch path has to serve.
WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
import kvxfer.kernels
out, lse = kvxfer.kernels.lse_combine(torch.ones(2, 1, 1, 4), torch.zeros(2, 1, 1), lse_base="2", return_lse=True)
assert out.tolist() == [[[1.0] * 4]] and lse.tolist() == [[1.0]]
rows = torch.arange(12, dtype=torch.uint8)
dense = torch.zeros(6, dtype=torch.uint8)
kvxfer.kernels.gather_rows(torch.tensor([rows.data_ptr()]), torch.tensor([3, 0]), dense, 3, 3)
assert dense.tolist() == [9, 10, 11, 0, 1, 2]
"""


def test_every_kernel_has_a_reference_of_the_same_name() -> None:
    ops = sorted(set(kvxfer.kernels.__all__) - {"A2ALayout", "LseBase"})
    assert sorted(kvxfer.kernels.reference.__all__) == ops
    for name in ops:
        kernel, reference = (
            list(inspect.signature(getattr(module, name)).parameters)
            for module in (kvxfer.kernels, kvxfer.kernels.reference)
        )
        # How many programs a launch has concerns the kernel alone.
        assert reference == [parameter for parameter in kernel if parameter != "max_ctas"], name


def test_without_triton_the_torch_path_serves() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_TRITON], check=True, timeout=60)
