#!/usr/bin/env bash
# Runs the benchmark on one rank and on two and prints one table, with the machine it ran on, to be pasted into reports.
#
#   dev/bench.sh [BENCH]     the program (default: build/bench)
set -eu
cd "$(dirname "$0")/.."
bench=${1:-build/bench}

# The user's settings of BLAS libraries must not touch the numbers; OpenMP's threads may spin: the machine should be ours.
unset OMP_NUM_THREADS OMP_WAIT_POLICY ${!OPENBLAS_@}
if (($(id -u) == 0)); then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi

echo "$(date +%F), $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1), $(nproc) cores, load $(cut -d' ' -f1 /proc/loadavg)"
echo
"$bench"
echo
mpirun -n 2 "$bench"
