#!/usr/bin/env bash
# A redis-server for the tests: the distribution's packages, unpacked below $1. Installs nothing, starts no service and
# needs no root. Without apt, or without a network, it says so and fails; tests that need Redis are then skipped by name.
set -euo pipefail

target=$1
if command -v redis-server valkey-server >/dev/null || [ -x "$target/usr/bin/redis-server" ]; then
  exit 0
fi
for tool in apt-get dpkg-deb; do
  if ! command -v "$tool" >/dev/null; then
    echo "no redis-server on PATH and no $tool to fetch one: tests that need Redis will be skipped" >&2
    exit 1
  fi
done

mkdir -p "$target/lists/partial" "$target/archives/partial"
cd "$target"
own=(-qq -o Debug::NoLocking=1 -o APT::Sandbox::User="$(id -un)" -o Dir::Cache="$PWD" -o Dir::Cache::archives="$PWD/archives")

# The packages that this machine lacks, redis-server first of all.
missing() { apt-get "${own[@]}" install --print-uris --no-install-recommends redis-server | awk '{print $2}' | sed 's/_.*//'; }

fetch() {
  local names
  names=$(missing) && [ -n "$names" ] || return 1
  # shellcheck disable=SC2086 - one word for each package
  (cd archives && apt-get "${own[@]}" download $names)
}

if ! fetch 2>/dev/null; then
  own+=(-o Dir::State::lists="$PWD/lists")
  apt-get "${own[@]}" update && fetch || {
    echo "redis-server could not be fetched: tests that need Redis will be skipped" >&2
    exit 1
  }
fi
for package in archives/*.deb; do
  dpkg-deb --extract "$package" .
done
rm -rf lists archives ./*.bin
