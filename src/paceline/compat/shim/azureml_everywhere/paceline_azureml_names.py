"""Lets `import azureml` find Paceline's names in every program of this environment, before the real SDK.

Copied here by `paceline azureml install`, with the .pth file that loads it; `paceline azureml uninstall` takes both away.
"""

import sys

# Not typing's, which takes longer to load than all else here.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any


# Every program of the environment loads this at its start: nothing is loaded before `azureml` is asked for.
class _Names:
    @staticmethod
    def find_spec(fullname: str, path: "Any" = None, target: "Any" = None) -> "Any":
        if fullname != "azureml" and not fullname.startswith("azureml."):
            return None
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not _Names]
        try:
            from paceline.compat.azureml import aliases
        except ModuleNotFoundError:
            return None  # Paceline was uninstalled
        aliases.install()
        return aliases.find_spec(fullname, path, target)


sys.meta_path.insert(0, _Names)
