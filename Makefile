# Works with GNU make 3.81 and bash 3.2, which macOS ships: no .ONESHELL, and nothing newer in the shell lines.
SHELL  := bash
PYTHON ?= python3
TORCH  ?= torch>=2.11
ARGS   ?=
LESSON_CORPUS ?=
RESET  ?=
BIN    := .venv/bin
READY  := .venv/ready
HOPPER := .venv/hopper
# Whether one of the GPUs has compute capability 9.0. Asks the driver, since it comes before torch.
HAS_HOPPER = nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2> /dev/null | grep -q '^9\.'
# pip compiles each file that it installs, most of which nothing imports: it takes longer than all else of an installation. Python compiles
# what it imports, and keeps that, unless an environment forbids it.
export PIP_COMPILE := 0
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help speedrun hopper lab lesson corpus confirm test export clean readme docs preview quarto notebooks exported FORCE
.NOTPARALLEL:

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile
	@echo; echo 'Each makes .venv on its first run and installs what it needs there. Variables:'
	@echo '  PYTHON=python3.12        the Python to make .venv from (3.10 or newer)'
	@echo '  TORCH="torch==2.13.0"    the torch to install, any pip requirement'
	@echo '  ARGS="--help"            arguments for speedrun_train, for make confirm, or for JupyterLab'
	@echo '  RESET=10_tf32            a lesson that make lab puts back as it was; your copy is kept'
	@echo '  LESSON_CORPUS=folder     what make lesson trains on: tokens as speedrun_data leaves them'

speedrun: $(READY) hopper ## train a GPT with the fastest rungs for this machine
	@$(BIN)/speedrun_train $(ARGS)

# The kernels for a Hopper GPU are asked for once: a stamp notes success. If the install fails, it says so and training goes on
# without them; the next make speedrun tries again.
hopper: $(READY)
	@if [ ! -e $(HOPPER) ] && $(HAS_HOPPER); then \
	    echo 'A Hopper GPU: installing FlashAttention-4 and QuACK for it (llm_speedrun[hopper]), which make training faster. Once, some minutes.'; \
	    if $(BIN)/python -m pip install -qq -e '.[hopper]' 2> .venv/hopper.log; then touch $(HOPPER); \
	    else echo 'That failed, so training goes on without them. pip said:'; tail -n 3 .venv/hopper.log; fi; \
	fi

lab: $(READY) ## open copies of the lessons in JupyterLab, at the table of contents
	@$(BIN)/python tests/lab.py $(if $(RESET),--reset $(RESET),$(ARGS))

# So many tokens train some ten minutes on an H100. An interrupted speedrun_data goes on where it was.
lesson: $(READY) ## train 124m on real text, FineWeb-Edu unless told otherwise, and tell its story (needs a GPU to mean something)
	@mkdir -p runs; corpus='$(LESSON_CORPUS)'; \
	case "$$corpus" in ''|/*) ;; *) corpus="$$PWD/$$corpus";; esac; \
	if [ -z "$$corpus" ] && ! $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
	    echo 'No GPU here: a smoke run on the offline corpus.'; \
	elif [ -z "$$corpus" ]; then \
	    corpus="$$PWD/runs/fineweb-edu"; \
	    [ -d "$$corpus" ] || $(BIN)/speedrun_data --data fineweb-edu --max_tokens 400000000 --val_frac 0.005 \
	        --out "$$corpus" || exit 1; \
	fi; \
	echo 'Running nbs/7_using_a_model/73_finale.ipynb, without a word until it is over.'; \
	LESSON_CORPUS="$$corpus" $(BIN)/python tests/run_notebook.py nbs/7_using_a_model/73_finale.ipynb runs/lesson.ipynb || exit 1; \
	echo 'The story is in runs/lesson.ipynb: open it with $(BIN)/jupyter lab runs/lesson.ipynb'

corpus: $(READY) ## make the public corpus of the races from repositories at pinned commits, in runs/corpus (needs the network)
	@mkdir -p runs; $(BIN)/python tests/make_corpus.py runs/corpus --clones runs/clones $(ARGS)

confirm: $(READY) hopper ## measure again what the site says, in ten minutes on a Hopper GPU, and hold it against the records
	@$(BIN)/python tests/confirm.py $(ARGS)

# Where `exported` fails it has rewritten files, and the tests would be of what nobody has looked at: it goes first, and ends all. A
# notebook that fails ends nothing: pytest runs too, and lists it once more. The last line is pytest's.
test: exported ## check that notebooks and package agree, then test every notebook, then run pytest
	@export FAILED_NOTEBOOKS="$$PWD/.venv/failed_notebooks"; rm -f "$$FAILED_NOTEBOOKS"; \
	$(BIN)/python tests/notebooks.py; notebooks=$$?; \
	$(BIN)/python -m pytest -q -n auto --dist worksteal tests; pytest=$$?; \
	[ $$notebooks -eq 0 ] && [ $$pytest -eq 0 ]

export: $(READY) ## write the package from the notebooks
	@$(BIN)/nbdev_export

clean: $(READY) ## take execution counts and stray metadata out of the notebooks
	@$(BIN)/nbdev_clean

readme: $(READY) ## write README.md from nbs/index.ipynb
	@$(BIN)/python tests/make_readme.py

docs: quarto ## build the docs site into _docs (needs Quarto)
	@$(BIN)/nbdev_docs
	@$(BIN)/python nbs/site/_build/finish.py _docs

preview: quarto ## show the docs site in a browser, and again after each change (needs Quarto)
	@$(BIN)/nbdev_preview $(ARGS)

# Quarto, and what it reads. nbdev writes its own README.md when ours is older than the index, so ours is written first. It keeps pages
# that exist no more in _proc, so _proc goes before.
quarto:
	@command -v quarto >/dev/null || { \
	    echo 'The docs site needs Quarto: get it from https://quarto.org/docs/get-started/ and try again.'; exit 1; }
	@$(MAKE) --no-print-directory readme
	@$(BIN)/python nbs/site/_build/build_pages.py
	@rm -rf _proc

notebooks: $(READY) ## run every notebook and keep its outputs (best on a GPU, takes some minutes)
	@for nb in nbs/[1-7]_*/*.ipynb nbs/source/*.ipynb nbs/source/*/*.ipynb nbs/index.ipynb; do \
	    start=$$SECONDS; echo "running $$nb"; \
	    $(BIN)/python tests/run_notebook.py "$$nb" && $(BIN)/nbdev_clean --fname "$$nb" || { \
	        echo "make notebooks stopped at $$nb: it is as it was before, and the notebooks after it have not been run."; exit 1; }; \
	    echo "   done in $$((SECONDS - start)) s"; \
	done
	@$(MAKE) --no-print-directory readme

# Fails when the package or a notebook is not what nbdev_export and nbdev_clean make of it. Compares checksums and asks git
# nothing, so that it tells the truth among uncommitted changes too.
CHECKSUMS = find nbs llm_speedrun -name .ipynb_checkpoints -prune -o \
    -type f \( -name '*.ipynb' -o -name '*.py' \) -exec cksum {} + | sort -k 3
exported: $(READY)
	@before=$$($(CHECKSUMS)); $(BIN)/nbdev_export && $(BIN)/nbdev_clean || exit 1; after=$$($(CHECKSUMS)); \
	changed=$$(diff <(echo "$$before") <(echo "$$after") | sed -n 's/^[<>] [0-9]* [0-9]* /  /p' | sort -u); \
	if [ -n "$$changed" ]; then \
	    echo 'These files were not what nbdev_export and nbdev_clean make of the notebooks:'; echo "$$changed"; \
	    echo 'They have just been rewritten. Look at the difference and commit it; `make export clean` does the same without tests.'; \
	    exit 1; fi

# settings.ini names processors of the docs site, which are in nbs/site/_build: a path file lets nbdev_docs, nbdev_preview and
# nbdev_proc_nbs find them.
$(READY): settings.ini setup.py .venv/torch
	@test -x $(BIN)/pip || { $(PYTHON) -c 'import sys; sys.version_info < (3, 10) and \
	    sys.exit("llm_speedrun needs Python 3.10 or newer, and $(PYTHON) is %d.%d: try make PYTHON=python3.12" % sys.version_info[:2])' \
	    && $(PYTHON) -m venv .venv; }
	@echo 'Installing llm_speedrun and $(TORCH) into .venv: some minutes the first time, seconds later.'
	@$(BIN)/python -m pip install -qq --upgrade pip
	@$(BIN)/python -m pip install -qq '$(TORCH)' -e '.[dev]'
	@$(BIN)/python -c 'import pathlib, sysconfig as s; \
	    pathlib.Path(s.get_path("purelib"), "llm_speedrun_site.pth").write_text(str(pathlib.Path("nbs/site/_build").resolve()))'
	@rm -f $(HOPPER)
	@touch $@

# Holds the torch asked for last, and is rewritten only when that changes: that is how make sees a new TORCH.
.venv/torch: FORCE
	@mkdir -p .venv; echo '$(TORCH)' | cmp -s - $@ || echo '$(TORCH)' > $@
