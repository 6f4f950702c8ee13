# Aliases only: the work is in tools/dev.py, which runs without make.
#   make test ARGS="-k layout"     make setup PYTHON=python3.12     make clean ARGS=--all
PYTHON ?= python3
ARGS ?=

.PHONY: setup demo test check wheels clean
setup demo test check wheels clean:
	@$(PYTHON) tools/dev.py $@ $(ARGS)
