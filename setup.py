"The package's metadata, all of it read from settings.ini, so that each fact stands in one place."
from configparser import ConfigParser
from pathlib import Path
from setuptools import setup, find_packages

here = Path(__file__).resolve().parent
ini = ConfigParser()
ini.read(here/"settings.ini", encoding="utf-8")
cfg = ini["DEFAULT"]
readme = here/"README.md"

def lines(key):
    "The values under `key`, one a line: an environment marker has spaces, so we must not split on those."
    return [o.strip() for o in cfg.get(key, "").splitlines() if o.strip()]

setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=readme.read_text(encoding="utf-8") if readme.exists() else cfg["description"],
    long_description_content_type="text/markdown",
    author=cfg["author"],
    url=cfg["git_url"],
    license="Apache-2.0",
    keywords=cfg["keywords"].split(),
    classifiers=["Development Status :: 3 - Alpha", "Intended Audience :: Developers",
                 "Programming Language :: Python :: 3"],
    packages=find_packages(include=[cfg["lib_path"], f"{cfg['lib_path']}.*"]),
    python_requires=f">={cfg['min_python']}",
    install_requires=lines("requirements"),
    extras_require=dict(dev=lines("dev_requirements"), hopper=lines("hopper_requirements")),
    entry_points=dict(console_scripts=lines("console_scripts"),
                      nbdev=[f"{cfg['lib_path']}={cfg['lib_path']}._modidx:d"]),
    zip_safe=False,
)
