# fsdp.c. `make help` lists what there is to make.
#
#   CC=clang            another compiler
#   MARCH=x86-64-v4     for other processors than this one (default: native)
#   SAN=address,undefined   with sanitizers, into build/<sanitizers>/; SAN=thread likewise, the tests of device and comm
#   DEBUG=1             without optimisation

CC     ?= cc
MARCH  ?= native
MPICC  ?= mpicc

comma := ,
BUILD := build$(if $(SAN),/$(subst $(comma),-,$(SAN)))$(if $(DEBUG),/debug)
# The normal build leaves its programs where their users look for them, the others in their own folder.
THREAD := $(filter thread,$(SAN))
PLACE := $(if $(SAN)$(DEBUG),$(BUILD)/)

# -ffp-contract=off: a fused multiply-add rounds once where the two operations round twice, and whether the compiler
# fuses must not decide a bit of a result. Never -ffast-math, for the same reason.
# -fno-math-errno: nobody asks, and a square root that may have to set errno is kept out of vectors.
# Wide vectors are asked for by name because compilers that do not know the processor settle for half.
accepts   = $(shell $(CC) $(1) -E -x c /dev/null >/dev/null 2>&1 && echo $(1))
OPTIMISE := $(if $(DEBUG),-O0,-O3 -march=$(MARCH) $(call accepts,-mprefer-vector-width=512)) -ffp-contract=off -fno-math-errno
WARNINGS := -Wall -Wextra -Werror
CFLAGS   := -std=gnu11 -g $(OPTIMISE) $(WARNINGS) $(if $(THREAD),,-fopenmp) -I. -Ifsdp $(if $(SAN),-fsanitize=$(SAN) -fno-omit-frame-pointer)
LDFLAGS  := $(if $(THREAD),,-fopenmp) $(if $(SAN),-fsanitize=$(SAN))
LDLIBS   := -ljansson -lpthread -lm
MPI_CFLAGS = $(shell $(MPICC) --showme:compile 2>/dev/null || $(MPICC) -compile_info | cut -d' ' -f2-)
MPI_LIBS   = $(shell $(MPICC) --showme:link 2>/dev/null || $(MPICC) -link_info | cut -d' ' -f2-)

ROOMS := error options device device_cpu comm_mpi ops_cpu_products ops_cpu attention_cpu fsdp trace log loader \
         tokenizer safetensors
ROOM_OBJECTS := $(ROOMS:%=$(BUILD)/%.o)
PROGRAMS := $(PLACE)train_gpt $(PLACE)data/stories $(PLACE)data/tokenize $(PLACE)data/ngram
TESTS := $(if $(THREAD),$(BUILD)/test_device $(BUILD)/test_comm,$(patsubst dev/%.c,$(BUILD)/%,$(wildcard dev/test_*.c)) \
         $(BUILD)/test_gpt)

# `make V=1` shows whole commands.
Q   := $(if $(V),,@)
say = $(if $(V),,@printf '  %-5s %s\n' $(1) $@)

.PHONY: all run test test-grid bench deps format clean help
.DELETE_ON_ERROR:
.SECONDARY:

all: $(if $(THREAD),tests,$(PROGRAMS))
	@:

help:
	@echo 'make            ./train_gpt and the data tools'
	@echo 'make run        install what is missing, build, prepare text, train on it with two ranks'
	@echo '                DATA=stories (default) | kjv | a text file; RANKS=2'
	@echo 'make test       install what is missing, build, also with sanitizers, run every test'
	@echo 'make test-grid  every combination of strategies and options on 1 to 8 ranks: some 8 minutes'
	@echo 'make bench      how fast it is: tables of a step of GPT-2 124M, its ops, the optimizer, the collectives'
	@echo 'make deps       install what is missing'
	@echo 'make format     clang-format over the sources'
	@echo 'make clean      remove what was built'
	@echo 'options: CC=clang  MARCH=x86-64-v4  SAN=address,undefined  SAN=thread  DEBUG=1'

# Other flags or another compiler make other objects: this file changes when they do.
FLAGS := $(BUILD)/flags
$(shell mkdir -p $(BUILD); echo '$(CC) $(CFLAGS) $(LDFLAGS) $(MPICC)' | cmp -s - $(FLAGS) || \
    echo '$(CC) $(CFLAGS) $(LDFLAGS) $(MPICC)' >$(FLAGS))

$(BUILD)/%.o: fsdp/%.c Makefile $(FLAGS)
	@mkdir -p $(@D)
	$(call say,CC)
	$(Q)$(CC) $(CFLAGS) $(if $(filter comm_mpi,$*),$(MPI_CFLAGS)) -MMD -c $< -o $@

$(BUILD)/data_%.o: data/%.c Makefile $(FLAGS)
	@mkdir -p $(@D)
	$(call say,CC)
	$(Q)$(CC) $(CFLAGS) -MMD -c $< -o $@

$(BUILD)/train_gpt.o: train_gpt.cu Makefile $(FLAGS)
	@mkdir -p $(@D)
	$(call say,CC)
	$(Q)$(CC) $(CFLAGS) -MMD -x c -c $< -o $@

$(PLACE)train_gpt: $(BUILD)/train_gpt.o $(ROOM_OBJECTS)
	$(call say,LINK)
	$(Q)$(CC) $(LDFLAGS) $^ $(MPI_LIBS) $(LDLIBS) -o $@

$(PLACE)data/%: $(BUILD)/data_%.o $(BUILD)/error.o $(BUILD)/options.o $(BUILD)/tokenizer.o
	@mkdir -p $(@D)
	$(call say,LINK)
	$(Q)$(CC) $(LDFLAGS) $^ -ljansson -lm -o $@

# ----------------------------------------------------------------------------------------------------------------------
# tests: dev/test_NAME.c and test_gpt.c, against cmocka

$(BUILD)/%.o: dev/%.c Makefile $(FLAGS)
	@mkdir -p $(@D)
	$(call say,CC)
	$(Q)$(CC) $(CFLAGS) -D_GNU_SOURCE -Idev -MMD -c $< -o $@

$(BUILD)/test_gpt.o: test_gpt.c Makefile $(FLAGS)
	@mkdir -p $(@D)
	$(call say,CC)
	$(Q)$(CC) $(CFLAGS) -Wno-unused-function -D_GNU_SOURCE -Idev -MMD -c $< -o $@

ifdef THREAD
$(BUILD)/test_%: $(BUILD)/test_%.o $(BUILD)/device.o $(BUILD)/device_cpu.o $(BUILD)/comm_mpi.o $(BUILD)/error.o
	$(call say,LINK)
	$(Q)$(CC) $(LDFLAGS) $^ $(MPI_LIBS) -lcmocka -lpthread -lm -o $@
else
$(BUILD)/test_gpt: $(BUILD)/test_gpt.o $(BUILD)/count_allocations.o $(ROOM_OBJECTS)
	$(call say,LINK)
	$(Q)$(CC) $(LDFLAGS) $^ $(MPI_LIBS) $(LDLIBS) -lcmocka -o $@

# It brings fsdp's source with it.
$(BUILD)/test_order: $(BUILD)/test_order.o $(filter-out %/fsdp.o,$(ROOM_OBJECTS))
	$(call say,LINK)
	$(Q)$(CC) $(LDFLAGS) $^ $(MPI_LIBS) $(LDLIBS) -lcmocka -o $@

$(BUILD)/test_%: $(BUILD)/test_%.o $(BUILD)/ops_reference.o $(ROOM_OBJECTS)
	$(call say,LINK)
	$(Q)$(CC) $(LDFLAGS) $^ $(MPI_LIBS) $(LDLIBS) -lcmocka -o $@
endif

# How fast it is, and how fast each op is. oneDNN's product is the measure.
$(BUILD)/bench.o: CFLAGS += -Wno-unused-function
$(BUILD)/bench $(BUILD)/bench_ops: $(BUILD)/%: $(BUILD)/%.o $(ROOM_OBJECTS)
	$(call say,LINK)
	$(Q)$(CC) $(LDFLAGS) $^ $(MPI_LIBS) $(LDLIBS) -ldnnl -o $@

bench:
	@scripts/deps.sh onednn
	@$(MAKE) --no-print-directory $(BUILD)/bench $(BUILD)/bench_ops
	@dev/bench.sh

# Every combination of what moves no number; `make test` runs every pair.
test-grid: deps
	@$(MAKE) --no-print-directory $(BUILD)/test_gpt
	@dev/run_tests.sh --grid

# The normal build, and what the sanitizers have to say: the thread sanitizer only where it understands all code, which
# leaves out OpenMP's.
test: deps
	@$(MAKE) --no-print-directory all tests
	@$(MAKE) --no-print-directory SAN=address,undefined all tests
	@$(MAKE) --no-print-directory SAN=thread tests
	@dev/run_tests.sh build build/address-undefined build/thread

.PHONY: tests
tests: $(TESTS)

# ----------------------------------------------------------------------------------------------------------------------

deps:
	@scripts/deps.sh

DATA  ?= stories
RANKS ?= 2
run: deps
	@$(MAKE) --no-print-directory all
	@scripts/run.sh '$(DATA)' $(RANKS)

format:
	clang-format -i train_gpt.cu test_gpt.c fsdp/*.[ch] data/*.c dev/*.[ch]

clean:
	rm -rf build train_gpt train_gptcu data/stories data/tokenize data/ngram

-include $(wildcard $(BUILD)/*.d)
