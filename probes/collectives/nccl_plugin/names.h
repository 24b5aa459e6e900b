/* Texts as numbers: each text is written once to nccl_names.jsonl, before the first record that refers to it. */
#ifndef RANKSCOPE_NAMES_H
#define RANKSCOPE_NAMES_H

#include <stdbool.h>
#include <stdint.h>

/* Open the file of names in `directory` and lock it; false if that is refused or another process records there. */
bool names_open(const char *directory);

/* The number of a text; 0 for NULL and the empty text. */
uint32_t name_of_text(const char *text);

/* The same for texts that stay at their address, as NCCL's own names do: no lock, no search after the first time. */
uint32_t name_of_constant(const char *text);

#endif
