import subprocess
import sys


def test_rendering_needs_neither_torch_nor_transformers():
    program = "import sys, polyturn.rendering.words; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"
