"""An import hook: in every program of a Python environment, `import azureml` loads Paceline's package.

`paceline azureml install` copies this file and a .pth file that loads it; `paceline azureml uninstall` removes both.
"""

import sys

# Don't import TYPE_CHECKING from typing, which takes longer to load than the rest of this file.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any


# Every program of the environment loads this file when it starts. Load Paceline only when a program imports `azureml`.
class _Names:
    @staticmethod
    def find_spec(fullname: str, path: "Any" = None, target: "Any" = None) -> "Any":
        if fullname != "azureml" and not fullname.startswith("azureml."):
            return None
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not _Names]
        try:
            from paceline.compat.azureml import aliases
        except ModuleNotFoundError:
            return None  # Paceline was uninstalled, and this file was left behind
        aliases.install()
        return aliases.find_spec(fullname, path, target)


sys.meta_path.insert(0, _Names)
