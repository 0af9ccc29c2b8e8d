#!/usr/bin/env bash
# Installs what building and testing need and this machine lacks; says nothing when it lacks nothing.
#
#   scripts/deps.sh        what everyone needs
#   scripts/deps.sh kjv    also the program `bible`, whose text `make run DATA=kjv` trains on
#   scripts/deps.sh onednn also oneDNN, which `make bench` measures itself against
#
# It looks for the compiler, headers, libraries and programs themselves, so what was installed by other means counts.
# With apt-get and the rights to use it the missing packages are installed; elsewhere the command is printed.
set -euo pipefail

export LC_ALL=C
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# builds COMPILER LINES [FLAG]...: whether a program with these lines before its main compiles and links.
builds() {
    local compiler=$1 lines=$2
    shift 2
    printf '%s\nint main(void) { return 0; }\n' "$lines" >"$work/probe.c"
    # The compiler may be several words, such as "ccache gcc".
    $compiler "$work/probe.c" -o "$work/probe" "$@" >/dev/null 2>&1
}

there() { command -v "$1" >/dev/null 2>&1; }

# Whether this machine has what is needed under that name.
have() {
    local cc=${CC:-cc}
    case $1 in
    compiler) builds "$cc" '#include <stdio.h>' ;;
    openmp) builds "$cc" '#include <omp.h>' -fopenmp ;;
    make) there make ;;
    mpi) builds "${MPICC:-mpicc}" '#include <mpi.h>' ;;
    mpirun) there mpirun ;;
    onednn) builds "$cc" '#include <dnnl.h>' -ldnnl ;;
    jansson) builds "$cc" '#include <jansson.h>' -ljansson ;;
    random123) builds "$cc" '#include <Random123/philox.h>' ;;
    cmocka)
        builds "$cc" $'#include <stdarg.h>\n#include <stddef.h>\n#include <stdint.h>\n#include <setjmp.h>\n#include <cmocka.h>' \
            -lcmocka
        ;;
    kjv) there bible ;;
    *) echo "usage: scripts/deps.sh [kjv] [onednn]" >&2 && exit 2 ;;
    esac
}

# package MANAGER NAME: the packages that bring it; none where the manager has none.
package() {
    case $1:$2 in
    apt-get:compiler) echo build-essential ;;
    apt-get:openmp) [[ ${CC:-cc} != *clang* ]] || echo libomp-dev ;;
    apt-get:make) echo make ;;
    apt-get:mpi) echo libopenmpi-dev openmpi-bin ;;
    apt-get:mpirun) echo openmpi-bin ;;
    apt-get:onednn) echo libdnnl-dev ;;
    apt-get:jansson) echo libjansson-dev ;;
    apt-get:random123) echo librandom123-dev ;;
    apt-get:cmocka) echo libcmocka-dev ;;
    apt-get:kjv) echo bible-kjv ;;
    brew:openmp) echo libomp ;;
    brew:compiler) echo gcc ;;
    *:compiler) echo gcc ;;
    *:make) echo make ;;
    dnf:mpi | dnf:mpirun) echo openmpi-devel ;;
    zypper:mpi | zypper:mpirun) echo openmpi4-devel ;;
    pacman:mpi | pacman:mpirun) echo openmpi ;;
    brew:mpi | brew:mpirun) echo open-mpi ;;
    dnf:onednn | zypper:onednn) echo onednn-devel ;;
    pacman:onednn | brew:onednn) echo onednn ;;
    dnf:jansson) echo jansson-devel ;;
    zypper:jansson) echo libjansson-devel ;;
    pacman:jansson | brew:jansson) echo jansson ;;
    dnf:random123) echo Random123-devel ;;
    dnf:cmocka | zypper:cmocka) echo libcmocka-devel ;;
    pacman:cmocka | brew:cmocka) echo cmocka ;;
    esac
}

needed=(compiler openmp make mpi mpirun jansson random123 cmocka "$@")

# Sets missing: the names of what is needed and not there.
look() {
    local name
    missing=()
    for name in "${needed[@]}"; do
        have "$name" || missing+=("$name")
    done
}

# Sets packages: those of the manager for what is missing, each once. Says where else to get what it does not have.
choose() {
    local name found
    packages=()
    for name in "${missing[@]}"; do
        found=$(package "$manager" "$name")
        if [[ -n $found ]]; then
            packages+=($found)
        elif [[ $name == random123 ]]; then
            echo "Random123 is headers only: put include/Random123 of https://github.com/DEShawResearch/random123" \
                "into /usr/local/include" >&2
        elif [[ $name == kjv ]]; then
            echo "kjv is the package bible-kjv of Debian and Ubuntu; elsewhere train on a text: make run DATA=FILE" >&2
        fi
    done
    packages=($(printf '%s\n' "${packages[@]}" | awk '!seen[$0]++'))
}

# print COMMAND: what the user is to run.
print() {
    echo "missing: ${missing[*]}" >&2
    ((${#packages[@]} == 0)) || echo "Install with: $1" >&2
    [[ $manager != dnf ]] || echo 'and then: export PATH=$PATH:/usr/lib64/openmpi/bin' >&2
    exit 1
}

manager=
for candidate in apt-get dnf zypper pacman brew; do
    there "$candidate" && manager=$candidate && break
done

look
((${#missing[@]} > 0)) || exit 0
if [[ " ${missing[*]} " == *" compiler "* && -n ${CC:-} && $CC != cc && $CC != gcc ]]; then
    echo "CC=$CC does not compile a program; install it, or leave CC out" >&2
    exit 1
fi
if [[ -z $manager ]]; then
    packages=()
    echo "found none of apt-get, dnf, zypper, pacman, brew to install it with" >&2
    print ''
fi
choose

case $manager in
dnf) print "sudo dnf install -y ${packages[*]}" ;;
zypper) print "sudo zypper install -y ${packages[*]}" ;;
pacman) print "sudo pacman -S --needed ${packages[*]}" ;;
brew) print "brew install ${packages[*]}" ;;
esac

# sudo may ask for a password only where somebody can answer.
if (($(id -u) == 0)); then as_root=()
elif there sudo && { sudo -n true 2>/dev/null || [[ -t 0 && -t 2 ]]; }; then as_root=(sudo)
else print "sudo apt-get update && sudo apt-get install -y ${packages[*]}"
fi

echo "installing with apt-get: ${packages[*]}"
apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3)
# Lists that could not be fetched may still be good enough, so only the installation decides.
"${apt[@]}" update >"$work/log" 2>&1 </dev/null || true
if ! "${apt[@]}" install -y --no-install-recommends "${packages[@]}" >>"$work/log" 2>&1 </dev/null; then
    tail -n 20 "$work/log" >&2
    print "sudo apt-get update && sudo apt-get install -y ${packages[*]}"
fi
look
if ((${#missing[@]} > 0)); then
    echo "installed ${packages[*]}, but still missing: ${missing[*]}" >&2
    exit 1
fi
