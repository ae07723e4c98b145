#!/bin/sh
# Runs the compiler that its arguments name. Fails where ptxas reports that it has serialized wgmma instructions (messages
# C7510 to C7519, "info" to it): such a kernel is correct and slow.
output=$("$@" 2>&1)
status=$?
[ -z "$output" ] || printf '%s\n' "$output" >&2
case $output in
  *"(C75"*)
    echo "ptxas has serialized wgmma instructions: see the messages (C75..) above" >&2
    status=1
    ;;
esac
exit $status
