"""Kernels that are started again get what Triton would give them, in the same order."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
from triton.backends.nvidia import driver as nvidia
from triton.tools.tensor_descriptor import TensorDescriptor

from torchflash.kernels import launcher

NAMES = ["X", "D", "T", "N", "E", "NONE", "SCALE", "BLOCK"]
SIGNATURE = {
    "X": "*fp32", "D": "tensordesc<fp32[4, 8]>", "T": ("*fp32", "*i32"), "N": "i32", "E": "tensordesc<fp32[2, 8]>",
    "NONE": "constexpr", "SCALE": "fp32", "BLOCK": "constexpr",
}  # fmt: skip
GRID, STREAM, FUNCTION, PACKED = 12, 5, 7, (4, 1, 0)


class Kernel:
    """What Triton compiled, with the last step, in C, replaced by a list."""

    def __init__(self, **launcher_attributes):
        self.got = []

        def launch(*args):
            self.got.append(args)

        meta = [{"first": True}, {"second": True}]
        run = object.__new__(nvidia.CudaLauncher)
        run.launch = nvidia.wrap_handle_tensordesc(launch, SIGNATURE, meta)
        run.num_ctas, run.launch_cooperative_grid, run.launch_pdl = 1, False, False
        run.global_scratch_size, run.global_scratch_align = 0, 1
        run.profile_scratch_size, run.profile_scratch_align = 0, 1
        for name, value in launcher_attributes.items():
            setattr(run, name, value)
        self.run, self.function, self.packed_metadata = run, FUNCTION, PACKED
        self.metadata = SimpleNamespace(tensordesc_meta=meta)
        self.arg_names = NAMES

    def launch_metadata(self, grid, stream, *args):
        return {"grid": grid, "stream": stream}


def tensors():
    return {
        "X": torch.randn(3), "D": torch.randn(16, 8), "E": torch.randn(6, 8),
        "T": (torch.randn(2), torch.zeros(2, dtype=torch.int32)),
    }  # fmt: skip


def described(changing):
    blocks = {"D": [4, 8], "E": [2, 8]}
    return {
        k: TensorDescriptor(v, list(v.shape), list(v.stride()), blocks[k]) if k in blocks else v
        for k, v in changing.items()
    }


def addresses(args):
    def plain(x):
        if isinstance(x, tuple):
            return tuple(map(plain, x))
        return x.data_ptr() if isinstance(x, torch.Tensor) else x

    return [plain(x) for x in args]


@pytest.fixture(autouse=True)
def no_device(monkeypatch):
    made = []

    def tensor_map(descriptor, description):
        made.append(descriptor.base.data_ptr())
        return [("map", descriptor.base.data_ptr(), *description), *descriptor.shape, *descriptor.strides]

    monkeypatch.setattr(nvidia, "make_tensordesc_arg", tensor_map)
    monkeypatch.setattr(launcher, "device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)
    return made


def started(kernel, changing):
    fixed = {"N": 70, "NONE": None, "SCALE": 0.5, "BLOCK": 64}
    first = described(changing)
    by_triton = {**fixed, **first}
    return launcher.Started(kernel, kernel, GRID, {**fixed, **first}, first), [by_triton[name] for name in NAMES]


def triton_gives(kernel, arguments, metadata=None, enter=None, leave=None):
    kernel.run(GRID, 1, 1, STREAM, FUNCTION, PACKED, metadata, enter, leave, *arguments)
    return addresses(kernel.got.pop())


def test_again_gives_what_triton_gives():
    kernel = Kernel()
    first, second = tensors(), tensors()
    known, arguments = started(kernel, first)
    assert known.direct is not None
    known.again(first)
    assert addresses(kernel.got.pop()) == triton_gives(kernel, arguments)
    known.again(second)
    _, arguments = started(kernel, second)
    assert addresses(kernel.got.pop()) == triton_gives(kernel, arguments)


def test_tensor_maps_are_made_once_for_an_address(no_device):
    kernel = Kernel()
    first, second = tensors(), tensors()
    known, _ = started(kernel, first)
    for changing in (first, second, first, second):
        known.again(changing)
    assert sorted(no_device) == sorted(x[name].data_ptr() for x in (first, second) for name in "DE")


def test_nothing_keeps_tensors_alive():
    kernel = Kernel()
    known, _ = started(kernel, tensors())
    held = [x for x in known.arguments if isinstance(x, (torch.Tensor, TensorDescriptor))]
    bases = [m.template.base for _, _, m in known.maps]
    assert not held and bases == [None, None]


def test_watched_launches_go_through_triton(monkeypatch):
    kernel = Kernel()
    first, second = tensors(), tensors()
    known, _ = started(kernel, first)
    calls = []
    monkeypatch.setattr(launcher.knobs.runtime, "launch_enter_hook", calls.append)
    known.again(second)
    found = addresses(kernel.got.pop())
    _, arguments = started(kernel, second)
    metadata = {"grid": (GRID, 1, 1), "stream": STREAM}
    assert found == triton_gives(kernel, arguments, metadata, calls.append)


def test_repeated_takes_what_start_took():
    kernel = Kernel()
    first = tensors()
    known, arguments = started(kernel, first)
    known.repeated(described(first))()
    assert addresses(kernel.got.pop()) == triton_gives(kernel, arguments)


@pytest.mark.parametrize("attributes", [{"global_scratch_size": 8}, {"profile_scratch_size": 8}, {"launch": print}])
def test_what_is_not_known_is_left_to_triton(attributes, monkeypatch):
    kernel = Kernel()
    changing = tensors()
    strange = Kernel(**attributes)
    known, _ = started(strange, changing)
    assert known.direct is None
    strange.run = kernel.run  # without what made it strange
    known.again(changing)
    _, arguments = started(kernel, changing)
    assert addresses(kernel.got.pop()) == triton_gives(kernel, arguments)
