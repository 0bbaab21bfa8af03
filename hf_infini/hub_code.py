"""How a saved model carries its code: copies of the modules that define it, under names that nobody else's files have."""

import functools
import hashlib
import inspect
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import transformers
from transformers import PreTrainedConfig
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.models.auto import modeling_auto
from transformers.utils import PushToHubMixin

from .options import ConfigBase

if TYPE_CHECKING:  # what a model's mixins come before; they have no base when the code runs
    from transformers import PreTrainedModel as ModelBase
else:
    ModelBase = object

PREFIX = re.compile(r"hf_infini_[0-9a-f]{8}_")
IS_COPY = PREFIX.match(__name__.rpartition(".")[2]) is not None  # this module, beside a model


class HubCodeMixin(PushToHubMixin):
    """What [`HubConfigMixin`] and [`HubModelMixin`] share. They act in the classes that [`carry_code`] names, and not in
    their subclasses, but for those that torch makes of them to shard a model (FSDP2).

    The copies are `hf_infini_<hash>_cache.py` and so on, with a hash of all code of the model's family. No file of a user
    has such a name; and where two versions meet in one process, their configuration classes are of two modules: transformers
    keeps the class of a model by that of its configuration, and would take the first version's for both.
    """

    auto_entries = {}  # references as in `auto_map`, without the prefix, by the name of the Auto class
    code_entry = ""  # the module that imports all code of the family

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        cls.auto_entries = {}  # what defines a subclass is another file

    @classmethod
    def register_for_auto_class(cls, *args, **kwargs):
        """Has transformers save a subclass with its file. Of the classes here it would overwrite what has the same name, and
        it calls this whenever it loads one by its copy."""
        if not cls.auto_entries:
            # pyrefly: ignore[missing-attribute]  # models and configurations have it, and not what both derive from
            super().register_for_auto_class(*args, **kwargs)

    def _get_files_timestamps(self, working_dir):
        # save_pretrained(push_to_hub=True) uploads what is newer than this says; the code was written just before
        times = super()._get_files_timestamps(working_dir)
        return {name: time for name, time in times.items() if not PREFIX.match(name)}


class HubConfigMixin(HubCodeMixin, ConfigBase):
    """Saves a configuration with the code that it consists of; comes before `PreTrainedConfig`."""

    def save_pretrained(self, save_directory, *args, **kwargs):
        entries = {}
        if self.auto_entries and not os.path.isfile(save_directory):
            entries = write_code(type(self), save_directory)
        given = (getattr(self, "auto_map", None) or {}).items()
        auto_map = {name: entry for name, entry in given if not self._is_stale(entry, save_directory)} | entries
        if auto_map or hasattr(self, "auto_map"):
            self.auto_map = auto_map
        return super().save_pretrained(save_directory, *args, **kwargs)

    def _is_stale(self, entry, folder) -> bool:
        """Whether an entry names code of this family that is not in the folder, as where another version was loaded."""
        module = str(entry).split(".")[0]
        name = PREFIX.sub("", module.split("--")[-1])
        ours = name in (f"configuration_{self.model_type}", f"modeling_{self.model_type}", self.code_entry)
        return ours and not (PREFIX.match(module) and Path(folder, f"{module}.py").is_file())


class HubModelMixin(HubCodeMixin, ModelBase):
    """Saves a model with its code, so that it loads where this package is not installed; comes before `PreTrainedModel`."""

    config_class: type[PreTrainedConfig]

    def save_pretrained(self, save_directory, is_main_process: bool = True, *args, **kwargs):
        defined = type(self)
        while defined.__module__.startswith("torch."):
            defined = next(base for base in defined.__bases__ if issubclass(base, HubModelMixin))
        if defined.auto_entries and is_main_process and not os.path.isfile(save_directory):
            entries = write_code(defined, save_directory)
            self.config.auto_map = {**(getattr(self.config, "auto_map", None) or {}), **entries}
        return super().save_pretrained(save_directory, is_main_process, *args, **kwargs)


def carry_code(code_entry: str, *others: type[HubCodeMixin], **classes: type[HubCodeMixin]) -> None:
    """Has models and configurations saved with their code, and adds the models' names to transformers' tables of model
    types, by which it knows what a class is for: for one, `Trainer` shifts smoothed labels of causal language models only.
    Registering with an Auto class leaves those tables as they are. `transformers serve` looks for the class that a
    configuration names among the attributes of transformers. There may be two modules of that name, as transformers imports
    itself again for its processors: what they share is their type.

    The modules that define the classes call it: the saved copies have no package whose `__init__` could.

    Args:
        code_entry: the module, beside this one, that all classes of the models' family can be imported from.
        others: classes that no Auto class loads.
        classes: the others, by the name of the Auto class that loads them.
    """
    entries = {}
    for auto_class, cls in classes.items():
        module = PREFIX.sub("", cls.__module__.rpartition(".")[2])
        if issubclass(cls, HubModelMixin):
            module = code_entry
            names = getattr(modeling_auto, auto_class)._model_mapping._model_mapping  # MODEL_FOR_…_MAPPING_NAMES
            names[cls.config_class.model_type] = cls.__name__
        entries[auto_class] = f"{module}.{cls.__name__}"
    for cls in (*others, *classes.values()):
        cls.auto_entries, cls.code_entry = entries, code_entry
        setattr(type(transformers), cls.__name__, cls)


def write_code(cls: type[HubCodeMixin], folder: str | os.PathLike) -> dict[str, str]:
    """Writes the modules that `cls.auto_entries` names, and all that they import with one dot, and removes those of other
    versions. Returns the entries with the names that the modules have there."""
    source = Path(inspect.getfile(cls))
    copied = PREFIX.match(source.name)  # this module is a copy itself: its names and imports are as they should be
    known = copied[0] if copied else ""
    modules = {entry.split(".")[0] for entry in cls.auto_entries.values()}
    files = {path.name: path.read_bytes() for module in modules for path in _closure(source.parent / f"{known}{module}.py")}
    prefix = known
    if not copied:
        digest = hashlib.sha256()
        for path in _closure(source.parent / f"{cls.code_entry}.py"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
        prefix = f"hf_infini_{digest.hexdigest()[:8]}_"
        relative = re.compile(rb"^(\s*from \.)(?=\w)", re.MULTILINE)
        files = {prefix + name: relative.sub(rb"\1" + prefix.encode(), text) for name, text in files.items()}
    os.makedirs(folder, exist_ok=True)
    for name, text in files.items():
        Path(folder, name).write_bytes(text)
    for path in Path(folder).glob("hf_infini_*.py"):
        if PREFIX.match(path.name) and not path.name.startswith(prefix):
            path.unlink()
    return {auto_class: prefix + entry for auto_class, entry in cls.auto_entries.items()}


@functools.cache  # 0.1 s for each save otherwise
def _closure(file: Path) -> tuple[Path, ...]:
    """A module's file and those that it imports with one dot, and these, in alphabetical order."""
    return tuple(sorted({file, *map(Path, get_relative_import_files(file))}))
