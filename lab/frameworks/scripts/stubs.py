"""An empty torchvision where there is none: its wheels for the processor alone are not everywhere, and
nothing of it is used here."""

import importlib.util
import sys
import types

NAMES = (
    "transforms",
    "transforms.functional",
    "datasets",
    "models",
    "models.feature_extraction",
    "ops",
    "ops.misc",
    "utils",
)


def made_up(name):
    """Any class that somebody imports and does not use."""
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


if importlib.util.find_spec("mcli") is None:  # MosaicML's own cloud, which Composer imports
    sys.modules["mcli"] = types.ModuleType("mcli")
    sys.modules["mcli"].__getattr__ = made_up

if importlib.util.find_spec("torchvision") is None:
    for full in ("torchvision", *(f"torchvision.{name}" for name in NAMES)):
        module = types.ModuleType(full)
        module.__spec__ = importlib.util.spec_from_loader(full, None)
        module.__getattr__, module.__path__ = made_up, []
        sys.modules[full] = module
        parent, _, name = full.rpartition(".")
        if parent:
            setattr(sys.modules[parent], name, module)
    sys.modules["torchvision"].__version__ = "0.0"
