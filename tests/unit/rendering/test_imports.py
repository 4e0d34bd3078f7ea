import subprocess
import sys

from parts.patience import PATIENCE_S


def test_rendering_needs_neither_torch_nor_transformers():
    program = "import sys, polyturn.rendering.words; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    assert result.stdout.strip() == "[]"
