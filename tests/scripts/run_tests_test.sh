#!/usr/bin/env bash
# scripts/run_tests.sh over programs that pass, fail, crash, hang, are skipped and are missing: one line each, the output of those
# that fail, the right counts and exit status. Continuous integration counts by that last line.
#
#   run_tests_test.sh RUN_TESTS WORK_DIRECTORY
set -euo pipefail
run_tests=$1
work=$2
rm -rf "$work"
mkdir -p "$work"
cd "$work"

program() {  # NAME: a program of the script on standard input
  { echo '#!/bin/sh'; cat; } >"$1"
  chmod +x "$1"
  echo "add_test($1 \"$work/$1\")" >>CTestTestfile.cmake
}
program good <<'END'
echo 'said by a program that passes'
echo '[==========] 5 tests from 2 test suites ran. (3 ms total)'
echo '[  PASSED  ] 4 tests.'
echo '[  SKIPPED ] 1 test, listed below:'
END
program python_good <<'END'
echo '3 passed, 2 skipped in 0.12s'
END

expect() {  # FILE TEXT
  grep -qF -- "$2" "$1" || { echo "missing: $2"; cat "$1"; exit 1; }
}
"$run_tests" --test-dir . >good.txt || { echo "programs that pass made it fail"; exit 1; }
expect good.txt 'tests: 7 passed, 0 failed, 3 skipped, in 2 programs'
if grep -q 'said by' good.txt; then echo "the output of a program that passes is shown"; exit 1; fi
[ "$(wc -l <good.txt)" -eq 3 ] || { echo "more than a line a program"; cat good.txt; exit 1; }

program bad <<'END'
echo 'a_test.cc:12: Failure'
echo '[  FAILED  ] Suite.Test (3 ms)'
echo '[==========] 7 tests from 2 test suites ran. (5 ms total)'
echo '[  PASSED  ] 6 tests.'
echo '[  FAILED  ] 1 test, listed below:'
echo '[  FAILED  ] Suite.Test'
exit 1
END
program python_bad <<'END'
echo '2 failed, 3 passed in 0.12s'
exit 1
END
program crash <<'END'
echo 'before the crash'
kill -SEGV $$
END
program hang <<'END'
exec sleep 60
END
echo 'set_tests_properties(hang PROPERTIES TIMEOUT 1)' >>CTestTestfile.cmake
program skipped <<'END'
exit 77
END
echo 'set_tests_properties(skipped PROPERTIES SKIP_RETURN_CODE 77)' >>CTestTestfile.cmake
echo "add_test(missing \"$work/missing\")" >>CTestTestfile.cmake

if "$run_tests" --test-dir . -j 2 >bad.txt 2>/dev/null; then echo "programs that fail made it succeed"; exit 1; fi
expect bad.txt 'a_test.cc:12: Failure'
expect bad.txt 'before the crash'
expect bad.txt 'Timeout'
expect bad.txt 'FAILED: bad: Suite.Test'
expect bad.txt 'FAILED: missing'
expect bad.txt 'tests: 16 passed, 6 failed, 4 skipped, in 8 programs'
echo "one line a program"
