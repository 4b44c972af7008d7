"""Imports every module of the installed package and touches every public name; run from outside the checkout."""

import importlib
import pkgutil

import riftco

count = 0
names = [module.name for module in pkgutil.walk_packages(riftco.__path__, "riftco.")]
for name in ["riftco", *names]:
    if name.endswith("__main__"):
        continue
    module = importlib.import_module(name)
    for public in getattr(module, "__all__", ()):
        getattr(module, public)
        count += 1
print(f"{len(names) + 1} modules, {count} public names, version {riftco.__version__}, from {riftco.__path__[0]}")
