"Processes that a program has started, found in /proc."
from pathlib import Path

def environment(pid):
    return dict(o.split("=", 1) for o in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in o)

def rank_of(pid):
    "The rank of a process, or None: its environment is that in which it began, which a copy has told us by its name"
    name = Path(f"/proc/{pid}/comm").read_text().split()
    return name[1] if name[0] == "rank" else environment(pid).get("RANK")

def workers(pid):
    "Rank -> process, of those that the command has started"
    try: found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError: return {}
    res = {}
    for c in found:
        try: res |= {int(r): int(c)} if (r := rank_of(c)) else workers(c)
        except (FileNotFoundError, ProcessLookupError, PermissionError): pass # it has just ended
    return res
