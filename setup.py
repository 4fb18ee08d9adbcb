"The package's metadata, all of it read from settings.ini, so that each fact stands in one place."
import re
from configparser import ConfigParser
from pathlib import Path
from setuptools import setup, find_packages

here = Path(__file__).resolve().parent
ini = ConfigParser()
ini.read(here/"settings.ini", encoding="utf-8")
cfg = ini["DEFAULT"]
readme, site = here/"README.md", cfg["doc_host"] + cfg["doc_baseurl"]

def lines(key):
    "The values under `key`, one a line: an environment marker has spaces, so we must not split on those."
    return [o.strip() for o in cfg.get(key, "").splitlines() if o.strip()]

def absolute(md):
    "`md` with links to files of the repository as addresses: on the package index there are no files beside it"
    def address(m):
        kind = "raw" if m[1].startswith("!") else "blob"
        return f"{m[1]}({cfg['git_url']}/{kind}/{cfg['branch']}/{m[2]}"
    return re.sub(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\((?![a-z][a-z0-9+.-]*:|#)([^)\s]+)", address, md)

setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=absolute(readme.read_text(encoding="utf-8")) if readme.exists() else cfg["description"],
    long_description_content_type="text/markdown",
    author=cfg["author"],
    url=cfg["git_url"],
    project_urls=dict(Documentation=site, Source=cfg["git_url"], Issues=f"{cfg['git_url']}/issues",
                      Changelog=f"{site}/reference/changelog.html"),
    license="Apache-2.0",
    keywords=cfg["keywords"].split(),
    classifiers=["Development Status :: 3 - Alpha", f"Intended Audience :: {cfg['audience']}",
                 "Topic :: Scientific/Engineering :: Artificial Intelligence", "Programming Language :: Python :: 3",
                 *(f"Programming Language :: Python :: {v}" for v in cfg["python_versions"].split())],
    packages=find_packages(include=[cfg["lib_path"], f"{cfg['lib_path']}.*"]),
    python_requires=f">={cfg['min_python']}",
    install_requires=lines("requirements"),
    extras_require=dict(dev=lines("dev_requirements"), hopper=lines("hopper_requirements")),
    entry_points=dict(console_scripts=lines("console_scripts"),
                      nbdev=[f"{cfg['lib_path']}={cfg['lib_path']}._modidx:d"]),
    zip_safe=False,
)
