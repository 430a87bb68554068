"""Print what this interpreter's environment lacks of a pyproject.toml's dependencies; print nothing if it is complete.

    python scripts/missing_packages.py pyproject.toml [extra]

Looks at the installed packages' metadata only: importing torch to find out would cost seconds at every start.
"""

import sys


def main(pyproject, extras):
    from importlib import metadata

    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib
    from packaging.requirements import Requirement

    with open(pyproject, "rb") as file:
        project = tomllib.load(file)["project"]
    missing = []
    for line in project["dependencies"] + [d for e in extras for d in project["optional-dependencies"][e]]:
        requirement = Requirement(line)
        if requirement.marker and not requirement.marker.evaluate():
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            version = None
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            missing.append(requirement.name + str(requirement.specifier))
    print(", ".join(missing))


if sys.version_info < (3, 10):
    print("Python 3.10 or newer")
else:
    try:
        main(sys.argv[1], sys.argv[2:])
    except ModuleNotFoundError:  # what a bare Python lacks to read the list, and then it lacks the rest as well
        print("the packages of pyproject.toml")
