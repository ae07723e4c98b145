#!/bin/sh
# Runs the compiler that its arguments name and fails where ptxas says that it has put waits between products of a
# warpgroup (messages C7510 to C7519, "info" to it): such a kernel is right and slow.
output=$("$@" 2>&1)
status=$?
[ -z "$output" ] || printf '%s\n' "$output" >&2
case $output in
  *"(C75"*)
    echo "products of a warpgroup wait for each other: see the messages (C75..) above" >&2
    status=1
    ;;
esac
exit $status
