"""The distribution: a wheel holds torchflash and nothing else, and works where only it is installed."""

import configparser
import dataclasses
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import torchflash

ROOT = Path(torchflash.__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(not (ROOT / "setup.cfg").exists(), reason="runs from a checkout")


def run(*command, cwd, **env):
    environment = {**os.environ, "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **env}
    command = [sys.executable, *map(str, command)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    ignore = shutil.ignore_patterns(".git", "__pycache__", "build", "*.egg-info", ".*_cache", ".hypothesis", ".venv")
    shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=ignore)
    how = ("--no-deps", "--no-build-isolation", "--no-index")
    run("-m", "pip", "wheel", *how, "-w", folder, folder / "source", cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_holds_only_torchflash(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"torchflash", f"torchflash-{torchflash.__version__}.dist-info"}
    for folder in ("torchflash", "passes", "kernels"):
        inside = "torchflash" if folder == "torchflash" else f"torchflash/{folder}"
        for file in (ROOT / folder).glob("*.py"):
            assert f"{inside}/{file.name}" in names
    assert "torchflash/py.typed" in names
    assert any(name.endswith("/LICENSE") for name in names)


def test_wheel_works_where_only_it_is_installed(wheel, tmp_path):
    site = tmp_path / "site"
    run("-m", "pip", "install", "--no-deps", "--no-index", "--target", site, wheel, cwd=tmp_path)
    program = """
import sys, torch
assert "torchflash" in torch._dynamo.list_backends()
function = torch.compile(lambda x: x.sin(), backend="torchflash", options={"torchflash.inner": "eager"})
torch.testing.assert_close(function(torch.ones(2)), torch.ones(2).sin())
import torchflash, torchflash.passes, torchflash.kernels
for module in (torchflash, torchflash.passes, torchflash.kernels):
    assert module.__file__.startswith(sys.argv[1]), module.__file__
from torchflash.inductor import source_files
assert all(str(file).startswith(sys.argv[1]) for file in source_files())
assert {file.parent.name for file in source_files()} >= {"torchflash", "passes", "kernels"}
"""
    run("-c", program, site, cwd=tmp_path, PYTHONPATH=str(site))


def test_metadata():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert setup["options"]["packages"].split() == ["torchflash", "torchflash.passes", "torchflash.kernels"]
    assert setup["options"]["install_requires"].split("\n")[1:] == [
        "torch>=2.11",
        'triton>=3.6; platform_system == "Linux"',
    ]


def test_readme_lists_every_code_and_option():
    readme = (ROOT / "README.md").read_text()
    for code, meaning in torchflash.SKIP_CODES.items():
        assert f"| `{code}` | {meaning} |" in readme
    for field in dataclasses.fields(torchflash.Options):
        assert f"| `torchflash.{field.name}` |" in readme


@pytest.mark.parametrize("name", ["passes", "kernels"])
def test_links_are_relative(name):
    link = ROOT / "torchflash" / name
    assert link.is_symlink() and os.readlink(link) == f"../{name}"
