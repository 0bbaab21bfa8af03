"""How a saved model is found again where hf_infini has not been imported, by the `auto_map` of its
configuration.

`save_pretrained` writes a stub that imports the package, so that transformers names what to
install. Pushing, or `save_code=True`, writes the code itself, for machines without the package: the
modules that the model needs in one folder, `hf_infini_<hash>`, flat, since transformers fetches
only a module's neighbours: `ops/state.py` is `ops_state.py` there. What a module imports by `from
.x import y` travels, and all modules of a package that imports them by their names.

Needed as long as transformers copies no packages (5.24: `get_relative_imports` takes `.a.b` for a
file of this name).
"""

import functools
import hashlib
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.utils import CONFIG_NAME, PushToHubMixin

from ..options import ConfigBase

ModelBase: Any = PreTrainedModel if TYPE_CHECKING else object  # what a model's mixins come before

STUB = "needs_hf_infini"
STUB_TEXT = '''"""This model needs the package hf-infini: pip install hf-infini"""

from hf_infini import (  # noqa: F401
{names})
'''
# Files and folders of code, and entries of an auto_map that name it, also those of earlier versions
CODE_FILES = re.compile(rf"hf_infini_[0-9a-f]{{8}}(_\w+\.py)?|{STUB}\.py")
ENTRIES = re.compile(
    rf"(.+--)?(hf_infini_[0-9a-f]{{8}}[/_]|{STUB}\.|(configuration|modeling)_(infini_gpt2|causal_mha)\.)"
)
BY_NAME = 'import_module(f"{__name__}'  # in a package's `__init__`: it imports its modules by name
IMPORT = re.compile(r"^(\s*from )(\.+)(\w[\w.]*)(?= import )", re.MULTILINE)
ROOT = Path(__file__).parents[1]
IS_COPY = not __name__.endswith(".compat.hub_code")
# By model type: the module from which its classes can be imported, and the classes by the Auto
# class that loads them
CODE: dict[str, tuple[str, dict[str, type]]] = {}


class HubCodeMixin(PushToHubMixin):
    """What configurations and models share that are pushed with their code."""

    @classmethod
    def register_for_auto_class(cls, *args, **kwargs):
        """Has transformers save a subclass with its file. Of the classes here it would overwrite
        what has the same name, and it calls this whenever it loads one by its copy."""
        if not any(cls in classes.values() for _, classes in CODE.values()):
            # pyrefly: ignore[missing-attribute]  # models and configurations have it, and not what both derive from
            super().register_for_auto_class(*args, **kwargs)

    def _upload_modified_files(self, working_dir, repo_id, files_timestamps, *args, **kwargs):
        # not an adapter of PEFT; what is pushed has its code
        if Path(working_dir, CONFIG_NAME).is_file():
            getattr(self, "config", self).save_pretrained(working_dir, save_code=True)
        others = {
            name: time for name, time in files_timestamps.items() if not CODE_FILES.fullmatch(name)
        }
        return super()._upload_modified_files(working_dir, repo_id, others, *args, **kwargs)


class HubConfigMixin(HubCodeMixin, ConfigBase):
    """Saves a configuration with its `auto_map`; comes before `PreTrainedConfig`."""

    def save_pretrained(self, save_directory, *args, save_code: bool = False, **kwargs):
        """As usual, into the folder `save_directory`; `save_code`: whether the model's code is
        written beside it, as it is into a folder that has code."""
        if self.model_type in CODE and not os.path.isfile(save_directory):
            given = (getattr(self, "auto_map", None) or {}).items()
            others = {name: entry for name, entry in given if not ENTRIES.match(str(entry))}
            self.auto_map = write_code(self.model_type, save_directory, save_code) | others
        return super().save_pretrained(save_directory, *args, **kwargs)


def carry_code(code_entry: str, **classes: type[HubCodeMixin]) -> None:
    """Has the classes of a model type found again, and adds the models' names to transformers'
    tables of model types, by which `Trainer` knows what a class is for. `transformers serve` looks
    for a class among the attributes of transformers, of which there may be two modules: what they
    share is their type. `code_entry`: the module, such as "models.families", from which all can be
    imported; `classes`: by the name of the Auto class that loads them."""
    for auto_class, cls in classes.items():
        known: Any = cls
        model_type = (
            known.config_class.model_type if issubclass(cls, PreTrainedModel) else known.model_type
        )
        CODE.setdefault(model_type, (code_entry, {}))[1][auto_class] = cls
        setattr(type(transformers), cls.__name__, cls)
        if issubclass(cls, PreTrainedModel):
            # MODEL_FOR_…_MAPPING_NAMES
            names = getattr(modeling_auto, auto_class)._model_mapping._model_mapping
            names[model_type] = cls.__name__


def write_code(model_type: str, folder: str | os.PathLike, save_code: bool) -> dict[str, str]:
    """Writes the stub of a `model_type` into a `folder`, or its code if `save_code`, in a copy of
    the code, and where the folder has code, and removes that of other versions; returns the entries
    of the `auto_map`."""
    code_entry, classes = CODE[model_type]
    os.makedirs(folder, exist_ok=True)
    found = [path for path in Path(folder).iterdir() if CODE_FILES.fullmatch(path.name)]
    if save_code or IS_COPY or any(path.is_dir() for path in found):
        kept, files = code_of(code_entry)
        home, module = Path(folder, kept), f"{kept}/{code_entry.replace('.', '_')}"
    else:
        names = "".join(
            f"    {name},\n" for name in sorted({cls.__name__ for cls in classes.values()})
        )
        kept, files = f"{STUB}.py", {f"{STUB}.py": STUB_TEXT.format(names=names)}
        home, module = Path(folder), STUB
    for path in found:
        if path.name != kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    home.mkdir(exist_ok=True)
    for name, text in files.items():
        (home / name).write_text(text, encoding="utf-8")
    return {auto_class: f"{module}.{cls.__name__}" for auto_class, cls in classes.items()}


@functools.cache
def code_of(code_entry: str) -> tuple[str, dict[str, str]]:
    """The name of the folder for the code of these models, and its files: all that the module
    `code_entry`, such as "models.families", imports of the package."""
    if IS_COPY:
        here = Path(__file__).parent
        return here.name, {
            path.name: path.read_text("utf-8")
            for path in here.glob("*.py")
            if path.name != "__init__.py"
        }
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
        text = text.replace(f"{BY_NAME}.", f"{BY_NAME}_") + (
            "\nif False:  # transformers copies what a text imports\n"
        )
        text += "".join(
            f"    from .{file.stem} import *\n" for file in sorted(path.glob("[!_]*.py"))
        )

    def flat(found: re.Match) -> str:
        target = (*package[: len(package) + 1 - len(found[2])], *found[3].split("."))
        imported.append(target)
        return f"{found[1]}.{'_'.join(target)}"

    return IMPORT.sub(flat, text), imported
