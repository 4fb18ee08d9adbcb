"CITATION.cff has what its format requires, and says what settings.ini and the page about citing say."
import configparser, re
import pytest
from make_readme import ROOT
from helpers.files import read_yaml

ini = configparser.ConfigParser()
ini.read(ROOT/"settings.ini", encoding="utf-8")
SETTINGS = ini["DEFAULT"]
PAGE = (ROOT/"nbs/site/reference/cite.qmd").read_text(encoding="utf-8")
URL = "https://github.com/{user}/{repo}".format(**SETTINGS)

# Of the Citation File Format 1.2.0 (github.com/citation-file-format): what a file must have, and all that it may
REQUIRED = set("cff-version message title authors".split())
KNOWN = REQUIRED | set("abstract commit contact date-released doi identifiers keywords license license-url preferred-citation references "
                       "repository repository-artifact repository-code type url version".split())
ENTITY = set("address alias city country date-end date-start email fax location name orcid post-code region tel website".split())

def read(): return read_yaml(ROOT/"CITATION.cff")

def wrong(c): # a citation
    "What its format wouldn't allow"
    yield from (f"no {k}" for k in REQUIRED - c.keys())
    yield from (f"unknown {k}" for k in c.keys() - KNOWN)
    if c.get("cff-version") != "1.2.0": yield "cff-version is 1.2.0"
    if c.get("type", "software") not in ("software", "dataset"): yield "type is software or dataset"
    for key in ("message", "title"):
        if not (isinstance(c.get(key), str) and c[key]): yield f"{key} is a text"
    people = c.get("authors")
    if not (isinstance(people, list) and people and all(isinstance(p, dict) and p.get("name") and p.keys() <= ENTITY for p in people)):
        yield "authors are entities with names"
    for key in ("repository-code", "url"):
        if not re.match(r"https?://", c.get(key, "https://")): yield f"{key} is an address"
    if len(set(c.get("keywords", []))) != len(c.get("keywords", [])): yield "keywords are told once"

def test_the_format(): assert not list(wrong(read()))

@pytest.mark.parametrize("change", [dict(message=...), dict(title=""), dict(authors=[]), dict(authors="us"), dict(authors=[dict(nick="us")]),
    {"cff-version": "1.1.0"}, dict(year=2026), dict(url="example.org"), dict(type="course"), dict(keywords=["a", "a"])], ids=str)
def test_what_the_format_would_not_allow(change):
    assert list(wrong({k: v for k, v in (read() | change).items() if v is not ...}))

def test_it_says_what_the_settings_say():
    c = read()
    assert (c["title"], str(c["version"]), c["abstract"]) == (SETTINGS["title"], SETTINGS["version"], SETTINGS["description"])
    assert c["keywords"] == SETTINGS["keywords"].split() and c["repository-code"] == URL
    assert [a["name"] for a in c["authors"]] == [SETTINGS["author"]] and c["license"] == "Apache-2.0" and SETTINGS["license"] == "apache2"

def test_the_page_says_the_same():
    entry = re.search(r"```bibtex\n(.*?)```", PAGE, re.S)[1].replace(r"\_", "_")
    for part in (f"{{{{{SETTINGS['author']}}}}}", f"{{{SETTINGS['version']}}}", f"{{{URL}}}", "{Apache-2.0}", "{" + SETTINGS["title"]):
        assert part in entry, part
    assert f"{URL}/blob/main/CITATION.cff" in PAGE
