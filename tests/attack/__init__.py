"""Attacks on the command line: wrong inputs, kills, small disks and memory, hostile texts, and fuzzing of the readers.

`make test-attack` runs all of it, `tests/test_attack.py` a sample. Each kind is a table that is easy to extend:

inputs.py    wrong options, spellings, configs, and damaged folders and files
kills.py     commands that are killed and repeated
limits.py    commands on a small disk, in little memory, and several at once
hostile.py   report pages of hostile names and texts in headless Chromium
fuzz.py      properties of the readers, for hypothesis
harness.py   starts commands, and judges how they end
zygote.py    a process that has imported everything, and forks for each command
stage.py     the tiny models, texts and runs that are attacked
"""
