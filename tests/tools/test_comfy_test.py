import re
import subprocess
import sys

import pytest

from tools import comfy_test
from tools.comfyui import ROOT


def test_only_node_files_of_the_host_that_cannot_be_imported_here_are_emptied(tmp_path):
    folder = tmp_path / "comfy_extras"
    folder.mkdir()
    (tmp_path / "folder_paths.py").touch()
    (tmp_path / "comfy").mkdir()
    good = (
        "import json\nimport comfy.utils\nfrom folder_paths import x\nfrom . import own\nNODE_CLASS_MAPPINGS = {1: 2}\n"
    )
    (folder / "nodes_good.py").write_text(good)
    (folder / "nodes_plain.py").write_text("import no_such_package.deep as deep\n")
    (folder / "nodes_from.py").write_text("from no_such_package.deep import thing\n")
    (folder / "helper.py").write_text("import no_such_package\n")

    blanked = comfy_test.blank_what_lacks_a_package(folder)

    assert blanked == ["nodes_from.py", "nodes_plain.py"]
    assert (folder / "nodes_good.py").read_text() == good
    assert (folder / "helper.py").read_text() == "import no_such_package\n"
    assert (folder / "nodes_from.py").read_text() == "NODE_CLASS_MAPPINGS = {}\n"


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.browser
def test_the_levels_of_comfy_test_pass_on_the_published_files(model_path):
    ran = subprocess.run([sys.executable, "-m", "tools.comfy_test"], cwd=ROOT, capture_output=True, text=True)
    if "pip could not do" in ran.stderr:
        pytest.skip(ran.stderr.strip())

    passed = [line.partition("]")[0].strip("[") for line in ran.stdout.splitlines() if line.endswith("] PASSED")]

    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    levels = re.findall(r'"(\w+)"', (ROOT / "comfy-test.toml").read_text().partition("levels = [")[2].partition("]")[0])
    assert sorted(name.lower() for name in passed) == sorted(levels)
