"""How a saved model is found again where hf_infini has not been imported, by the `auto_map` of its configuration.

`save_pretrained` writes a stub of one import, so that transformers names the package to install. Pushing, or
`save_code=True`, writes the code itself, for machines without the package: the modules that the model needs in one folder,
`hf_infini_<hash>`, flat, since transformers fetches only a module's neighbours: `ops/window.py` is `ops_window.py` there. What
travels is what is imported by `from .x import y`, and, with a package whose `__init__` has
`import_module(f"{__name__}.{name}")`, all modules in it.

Needed as long as transformers copies no packages (5.24: `get_relative_imports` takes `.a.b` for a file of this name).
"""

import functools
import hashlib
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.utils import PushToHubMixin

from ..options import ConfigBase

if TYPE_CHECKING:  # what a model's mixins come before; they have no base when the code runs
    from transformers import PreTrainedModel as ModelBase
else:
    ModelBase = object

STUB = "needs_hf_infini"
# Entries of an auto_map that name code of this package, also as earlier versions saved it
OURS = re.compile(rf"(?:^|--)(?:hf_infini_[0-9a-f]{{8}}[/_]|{STUB}\.)")
FOLDERS = "hf_infini_[0-9a-f]*"
# Of the package, or of a folder of copies
ROOT, SUFFIX = Path(__file__).parents[1], ".compat.hub_code"
IS_COPY = not __name__.endswith(SUFFIX)
# A package's `__init__` that imports its modules by name; all of them travel
BY_NAME, BY_FLAT_NAME = 'import_module(f"{__name__}.', 'import_module(f"{__name__}_'
IMPORT = re.compile(r"^(\s*from )(\.+)(\w[\w.]*)(?= import )", re.MULTILINE)
# By model type: the module from which the classes can be imported, and the classes by the Auto class that loads them
CODE: dict[str, tuple[str, dict[str, type]]] = {}


class HubCodeMixin(PushToHubMixin):
    """What [`HubConfigMixin`] and [`HubModelMixin`] share."""

    @classmethod
    def register_for_auto_class(cls, *args, **kwargs):
        """Has transformers save a subclass with its file. Of the classes here it would overwrite what has the same name, and
        it calls this whenever it loads one by its copy."""
        if not any(cls in classes.values() for _, classes in CODE.values()):
            # pyrefly: ignore[missing-attribute]  # models and configurations have it, and not what both derive from
            super().register_for_auto_class(*args, **kwargs)

    def push_to_hub(self, *args, **kwargs):
        self.__dict__["_pushing"] = True  # and so saving with code
        try:
            return super().push_to_hub(*args, **kwargs)
        finally:
            self.__dict__.pop("_pushing", None)

    def _get_files_timestamps(self, working_dir):
        # save_pretrained(push_to_hub=True) uploads what is newer than this says; the code was written just before
        times = super()._get_files_timestamps(working_dir)
        return {name: time for name, time in times.items() if not name.startswith(("hf_infini_", STUB))}

    def _saves_code(self, asked: bool | None, push_to_hub: bool) -> bool:
        return IS_COPY or (asked if asked is not None else push_to_hub or "_pushing" in self.__dict__)


class HubConfigMixin(HubCodeMixin, ConfigBase):
    """Saves a configuration with its `auto_map`; comes before `PreTrainedConfig`."""

    def save_pretrained(self, save_directory, push_to_hub: bool = False, *, save_code: bool | None = None, **kwargs):
        """As usual.

        Args:
            save_code: whether the model's code is written beside it; `None`: if this is pushed, or the folder has it.
        """
        if self.model_type in CODE and not os.path.isfile(save_directory):
            entries = write_code(self.model_type, save_directory, self._saves_code(save_code, push_to_hub))
            given = (getattr(self, "auto_map", None) or {}).items()
            self.auto_map = entries | {name: entry for name, entry in given if not OURS.search(str(entry))}
        return super().save_pretrained(save_directory, push_to_hub, **kwargs)


class HubModelMixin(HubCodeMixin, ModelBase):
    """Saves a model with its code where that is asked for; comes before `PreTrainedModel`."""

    config_class: type[PreTrainedConfig]

    def save_pretrained(self, save_directory, is_main_process: bool = True, *args, save_code: bool | None = None, **kwargs):
        """As usual.

        Args:
            save_code: whether the model's code is written beside it, so that it loads where hf_infini is not installed;
                `None`: if this is pushed. Otherwise its folder asks for the package.
        """
        code = self._saves_code(save_code, kwargs.get("push_to_hub", False))
        if is_main_process and code and self.config.model_type in CODE and not os.path.isfile(save_directory):
            write_code(self.config.model_type, save_directory, True)
        return super().save_pretrained(save_directory, is_main_process, *args, **kwargs)


def carry_code(code_entry: str, **classes: type[HubCodeMixin]) -> None:
    """Has the classes of a model type found again, and adds the models' names to transformers' tables of model types, by
    which it knows what a class is for: for one, `Trainer` shifts smoothed labels of causal language models only. Registering
    with an Auto class leaves those tables as they are.

    Args:
        code_entry: the module, such as "models.families", from which all of these classes can be imported.
        classes: by the name of the Auto class that loads them.
    """
    for auto_class, cls in classes.items():
        known: Any = cls
        model_type = known.config_class.model_type if issubclass(cls, HubModelMixin) else known.model_type
        CODE.setdefault(model_type, (code_entry, {}))[1][auto_class] = cls
        if issubclass(cls, HubModelMixin):
            names = getattr(modeling_auto, auto_class)._model_mapping._model_mapping  # MODEL_FOR_…_MAPPING_NAMES
            names[model_type] = cls.__name__


def write_code(model_type: str, folder: str | os.PathLike, whole: bool) -> dict[str, str]:
    """Writes the stub or, if `whole`, the code of a model type, and removes that of other versions. A folder that has this
    version's code keeps it. Returns the entries of the `auto_map`."""
    code_entry, classes = CODE[model_type]
    names = {auto_class: cls.__name__ for auto_class, cls in classes.items()}
    code_folder, files = code_of(code_entry)
    target = Path(folder, code_folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    for other in target.parent.glob(FOLDERS):
        if other.is_dir() and other != target and re.fullmatch(r"hf_infini_[0-9a-f]{8}", other.name):
            shutil.rmtree(other)
    stub = target.with_name(f"{STUB}.py")
    if whole or target.is_dir():
        stub.unlink(missing_ok=True)
        target.mkdir(exist_ok=True)
        for name, text in files.items():
            (target / name).write_text(text, encoding="utf-8")
        return {auto_class: f"{code_folder}/{code_entry.replace('.', '_')}.{name}" for auto_class, name in names.items()}
    lines = "".join(f"    {name},\n" for name in sorted({*names.values()}))
    stub.write_text(STUB_TEXT.format(entry=code_entry, names=lines), encoding="utf-8")
    return {auto_class: f"{STUB}.{name}" for auto_class, name in names.items()}


STUB_TEXT = '''"""The code of this model is in the package hf-infini: pip install hf-infini"""

from hf_infini.{entry} import (
{names})
'''


@functools.cache
def code_of(code_entry: str) -> tuple[str, Mapping[str, str]]:
    """The name of the folder for the code of these models, and its files: the module, and all that it imports of the
    package, in turn."""
    if IS_COPY:
        here = Path(__file__).parent
        return here.name, {path.name: path.read_text("utf-8") for path in here.glob("*.py") if path.name != "__init__.py"}
    files, waiting = {}, [tuple(code_entry.split("."))]
    while waiting:
        module = waiting.pop()
        name = "_".join(module) + ".py"
        if name not in files:
            files[name], imported = _flat(module)
            waiting += imported
    digest = hashlib.sha256("\0".join(name + "\0" + files[name] for name in sorted(files)).encode())
    return f"hf_infini_{digest.hexdigest()[:8]}", files


def _flat(module: tuple[str, ...]) -> tuple[str, list[tuple[str, ...]]]:
    """A module's text in which the names of the package's modules are flat, and these modules."""
    path, imported = ROOT.joinpath(*module), []
    is_package = path.is_dir()
    package = module if is_package else module[:-1]
    text = (path / "__init__.py" if is_package else path.with_suffix(".py")).read_text("utf-8")
    if is_package and BY_NAME in text:
        text = text.replace(BY_NAME, BY_FLAT_NAME) + "\nif False:  # transformers copies what a text imports\n"
        text += "".join(f"    from .{file.stem} import *\n" for file in sorted(path.glob("[!_]*.py")))

    def flat(found: re.Match) -> str:
        target = (*package[: len(package) + 1 - len(found[2])], *found[3].split("."))
        imported.append(target)
        return f"{found[1]}.{'_'.join(target)}"

    return IMPORT.sub(flat, text), imported
