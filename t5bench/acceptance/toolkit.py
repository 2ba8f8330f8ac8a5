"""What a CUDA toolkit lacks for compiling, from the libraries that PyTorch brings.

Many images have nvcc and CUDA's runtime alone. PyTorch's headers ask for cuSPARSE's and DeepSpeed links cuRAND, both of
which lie in the nvidia packages beside PyTorch, the libraries under names with a version that a linker does not try.
"""

import re
import shutil
from collections.abc import Iterable
from importlib import util
from pathlib import Path

# One that every complete toolkit has and no compiler alone.
_TELLING_HEADER = "cusparse.h"


def completions(directory: Path, nvcc: str | None = None, packages: Iterable[Path] | None = None) -> dict[str, str]:
    """CUDA_HOME where ``nvcc`` is a link, for PyTorch takes the link's place for it; CPATH and LIBRARY_PATH that
    complete its toolkit where that is a compiler alone. Nothing where nothing is lacking or there is no nvcc.

    Links to the libraries go into ``directory``. packages: folders of the nvidia packages (default: torch's own).
    """
    nvcc = nvcc or shutil.which("nvcc")
    if not nvcc:
        return {}
    home = Path(nvcc).resolve().parent.parent
    found = {} if home == Path(nvcc).parent.parent else {"CUDA_HOME": str(home)}
    if (home / "include" / _TELLING_HEADER).exists():
        return found
    folders = list(_nvidia_packages() if packages is None else packages)
    headers = [str(path) for folder in folders for path in sorted(folder.glob("*/include"))]
    if not any((Path(path) / _TELLING_HEADER).exists() for path in headers):
        return found
    directory.mkdir(parents=True, exist_ok=True)
    for library in (path for folder in folders for path in sorted(folder.glob("*/lib/lib*.so.*"))):
        link = directory / re.sub(r"\.so\..*", ".so", library.name)
        if not link.exists():
            link.symlink_to(library)
    return found | {"CPATH": ":".join(headers), "LIBRARY_PATH": str(directory)}


def _nvidia_packages() -> Iterable[Path]:
    spec = util.find_spec("nvidia")
    return map(Path, spec.submodule_search_locations or ()) if spec else ()
