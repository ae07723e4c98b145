#!/usr/bin/env bash
# The program's manual pages and completion scripts, as a shell and troff meet them: pages_test.sh PROGRAM PAGES [CMAKE BUILD].
# PAGES: the folder with what the build wrote. With CMAKE and BUILD also what is installed, and where. Shells that are not
# here are named and left out; bash is.
set -euo pipefail
folio=$1
pages=$2
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

fail() { echo "pages_test: $*" >&2; exit 1; }
# has TEXT WORD: TEXT, one word a line, has that line.
has() { grep -qxF -- "$2" <<<"$1" || fail "'$2' is not among: $1"; }
lacks() { if grep -qxF -- "$2" <<<"$1"; then fail "'$2' is among: $1"; fi; }

subcommands=$("$folio" --help | sed -n '/^Subcommands:/,/^$/p' | awk '/^  [a-z]/ {print $1}')
[ "$(wc -l <<<"$subcommands")" -ge 7 ] || fail "the help lists the subcommands: $subcommands"

bash_completion() {
  # shellcheck disable=SC1090
  source <("$folio" completion bash)
  complete_words() {
    COMP_WORDS=("$@")
    COMP_CWORD=$(($# - 1))
    _folio
    printf '%s\n' "${COMPREPLY[@]}"
  }
  local command words
  words=$(complete_words folio '')
  for command in $subcommands; do has "$words" "$command"; done
  has "$words" --version
  words=$(complete_words folio replay --clo)
  [ "$words" = --clock ] || fail "'folio replay --clo' gives '$words'"
  words=$(complete_words folio replay --clock '')
  has "$words" measured
  lacks "$words" --clock
  has "$(complete_words folio bench --model gpt)" gpt-oss-20b
  has "$(complete_words folio replay --kv-dtype '')" fp8_e4m3
  touch "$scratch/a_trace.jsonl"
  has "$(complete_words folio replay "$scratch/a_")" "$scratch/a_trace.jsonl"
  has "$(complete_words folio replay --json "$scratch/a_")" "$scratch/a_trace.jsonl"
  [ -z "$(complete_words folio replay --seed '')" ] || fail "a number has no completion"
  has "$(complete_words folio completion '')" zsh
  # Every option of every help is offered.
  for command in $subcommands; do
    words=$(complete_words folio "$command" -)
    for option in $("$folio" "$command" --help | grep -oE '^  (-[a-zA-Z],)?--[a-z0-9-]+' | grep -oE -- '--[a-z0-9-]+'); do
      has "$words" "$option"
    done
  done
}

zsh_completion() {
  command -v zsh >/dev/null || { echo "no zsh here: its completion was not tried"; return; }
  "$folio" completion zsh > "$scratch/_folio"
  zsh -n "$scratch/_folio"
  # What the completion function asks zsh for, by stand-ins for zsh's own functions.
  zsh -fc '
    _describe() { print -l -- ${commands%%:*}; }
    _arguments() { if [[ $1 == -C ]]; then state=arguments line=(replay); else print -l -- "$@"; fi; }
    compdef() { :; }
    source $1
    _folio' zsh "$scratch/_folio" > "$scratch/zsh_words"
  grep -qF -- '--clock[' "$scratch/zsh_words" || fail "zsh is not offered --clock"
  grep -qF -- ':(fixed measured wall)' "$scratch/zsh_words" || fail "zsh is not offered the values of --clock"
}

fish_completion() {
  command -v fish >/dev/null || { echo "no fish here: its completion was not tried"; return; }
  "$folio" completion fish > "$scratch/folio.fish"
  local words
  words=$(HOME=$scratch fish -c "source $scratch/folio.fish; complete -C 'folio replay --clo'; complete -C 'folio replay --clock '; \
    complete -C 'folio '" | cut -f 1)
  has "$words" --clock
  has "$words" measured
  for command in $subcommands; do has "$words" "$command"; done
}

manual() {
  local page command option
  for command in '' $subcommands; do
    page=$pages/folio${command:+-$command}.1
    [ -s "$page" ] || fail "the build wrote no $page"
    # shellcheck disable=SC2086
    "$folio" man $command | cmp - "$page" || fail "$page is not what the program writes"
    [ -n "$command" ] || continue
    for option in $("$folio" "$command" --help | grep -oE '^  (-[a-zA-Z],)?--[a-z0-9-]+' | grep -oE -- '--[a-z0-9-]+'); do
      grep -qF -- "\\fB${option//-/\\-}\\fR" "$page" || fail "$page has no $option"
    done
  done
  command -v groff >/dev/null || { echo "no groff here: the manual pages were not set"; return; }
  for page in "$pages"/*.1; do
    groff -man -Tutf8 -ww -z "$page" 2> "$scratch/warnings" || fail "groff refuses $page"
    [ ! -s "$scratch/warnings" ] || fail "$page: $(cat "$scratch/warnings")"
  done
  groff -man -Tascii -P-c -P-b -P-u "$pages/folio-replay.1" | grep -q 'folio replay \[OPTIONS\] trace' || fail "the synopsis is not set"
}

installed() {
  "$1" --install "$2" --prefix "$scratch/prefix" --component tools > /dev/null
  local command
  for command in '' $subcommands; do
    [ -s "$scratch/prefix/share/man/man1/folio${command:+-$command}.1" ] || fail "the page of '$command' is not installed"
  done
  for file in bash-completion/completions/folio zsh/site-functions/_folio fish/vendor_completions.d/folio.fish; do
    [ -s "$scratch/prefix/share/$file" ] || fail "share/$file is not installed"
  done
}

bash_completion
zsh_completion
fish_completion
manual
if [ $# -ge 4 ]; then installed "$3" "$4"; fi
echo "completions and manual pages of $(wc -w <<<"$subcommands") subcommands"
