#!/usr/bin/env bash
# Runs tests with ctest and prints one line a test program: whether it passed, its time, how many tests it has. Of a program that
# fails, what it printed follows. Ends with a line that counts all of them, and the names of those that failed.
#
#   scripts/run_tests.sh CTEST_ARGUMENT...       scripts/run_tests.sh --preset release -L unit
set -o pipefail

ctest -V "$@" | awk '
  # GoogleTest and pytest both say at their end how many tests there were; another program is one test.
  function note(program, text,   number) {
    if (text ~ /^\[==========\] [0-9]+ tests? from .* ran/) { split(text, word, " "); ran[program] += word[2]; counted[program] = 1 }
    else if (text ~ /^\[  SKIPPED \] [0-9]+ tests?/) { split(text, word, " "); skipped[program] += word[4] }
    else if (text ~ /^\[  FAILED  \] [0-9]+ tests?, listed/) { split(text, word, " "); failed[program] += word[4] }
    else if (text ~ /^\[  FAILED  \] [^ ]+$/) names[program] = names[program] " " substr(text, 14)
    else if (text ~ /^[0-9]+ (passed|failed|skipped).* in [0-9.]+s/) {
      counted[program] = 1
      number = split(text, word, /[ ,]+/)
      for (i = 1; i < number; i += 2) {
        if (word[i + 1] == "skipped") skipped[program] += word[i]
        if (word[i + 1] == "failed") failed[program] += word[i]
        if (word[i + 1] ~ /^(passed|failed|skipped)$/) ran[program] += word[i]
      }
    }
  }
  function finish(program, name, status, seconds,   good) {
    good = status ~ /^(Passed|Skipped)$/
    if (!counted[program]) ran[program] = 1
    if (status == "Skipped" && !skipped[program]) skipped[program] = ran[program]
    if (!good && !failed[program]) failed[program] = 1
    if (good) failed[program] = 0
    printf "%-7s %7.1f s %6d tests%s  %s\n", good ? (status == "Skipped" ? "skipped" : "ok") : "FAILED", seconds, ran[program],
      skipped[program] ? sprintf(" (%d skipped)", skipped[program]) : "", name
    if (!good) { printf "%s", lines[program]; printf "        %s\n", status; broken[++num_broken] = name (names[program] ? ":" : "") names[program] }
    delete lines[program]
    programs++; all_ran += ran[program]; all_skipped += skipped[program]; all_failed += failed[program]
    fflush()
  }
  /^[0-9]+: / {
    program = substr($0, 1, index($0, ":") - 1)
    text = substr($0, length(program) + 3)
    if (text ~ /^(Test command:|Working Directory:|Environment variables:|Test timeout computed)/) next
    if (text ~ /^ *(FOLIO_|GTEST_|PYTHON|OMPI_|PMIX_|ASAN_)[A-Z_]*=/ || text == "") next
    note(program, text)
    lines[program] = lines[program] "        " text "\n"
    next
  }
  /^ *[0-9]+\/[0-9]+ Test +#[0-9]+: / {
    match($0, /#[0-9]+: /)
    program = substr($0, RSTART + 1, RLENGTH - 3)
    rest = substr($0, RSTART + RLENGTH)
    name = rest; sub(/[ .].*$/, "", name)
    if (match(rest, /^[^ ]+/)) name = substr(rest, 1, RLENGTH)
    status = rest
    sub(/^[^ ]+ [.]*[ *]*/, "", status)
    seconds = 0
    if (match(status, /[0-9.]+ sec/)) seconds = substr(status, RSTART, RLENGTH - 4)
    sub(/ +[0-9.]+ sec.*$/, "", status)
    finish(program, name, status, seconds)
    next
  }
  /^(CMake Error|ctest:|No tests were found|Unable to find)/ { print }
  END {
    for (i = 1; i <= num_broken; ++i) print "FAILED: " broken[i]
    printf "tests: %d passed, %d failed, %d skipped, in %d programs\n", all_ran - all_failed - all_skipped, all_failed, all_skipped, programs
  }'
