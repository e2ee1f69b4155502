/* Runs MODEL on raw tensors: MODEL INPUT... OUTPUT..., one file for each, in the order of MODEL_run, "-" being the standard stream.
   Elements are as they lie in memory, without a header. A file may hold any number of batches, one after another. */
#include <stdio.h>
#include <string.h>

#include "MODEL.h"

#define INPUTS INPUT_COUNT
#define OUTPUTS OUTPUT_COUNT

BUFFERS

static FILE *opened(const char *name, int writing)
{
    if (strcmp(name, "-") == 0) return writing ? stdout : stdin;
    FILE *file = fopen(name, writing ? "wb" : "rb");
    if (!file) fprintf(stderr, "%s cannot be opened\n", name);
    return file;
}

int main(int count, char **names)
{
    FILE *files[INPUTS + OUTPUTS];
    void *const values[INPUTS + OUTPUTS] = {VALUES};
    const size_t bytes[INPUTS + OUTPUTS] = {BYTES};
    if (count != 1 + INPUTS + OUTPUTS) {
        fprintf(stderr, "usage: %sUSAGE\n", names[0]);
        return 2;
    }
LOAD
    for (int i = 0; i < INPUTS + OUTPUTS; i++) {
        files[i] = opened(names[1 + i], i >= INPUTS);
        if (!files[i]) return 2;
    }
    for (;;) {
        for (int i = 0; i < INPUTS; i++) {
            size_t got = fread(values[i], 1, bytes[i], files[i]);
            if (got == 0 && i == 0) goto end;
            if (got != bytes[i]) {
                fprintf(stderr, "%s ends inside of a batch, which has %lu bytes\n", names[1 + i], (unsigned long)bytes[i]);
                return 1;
            }
        }
        if (RUN != 0) {
            fprintf(stderr, "an input names an element that does not exist, or divides by 0\n");
            return 1;
        }
        for (int i = INPUTS; i < INPUTS + OUTPUTS; i++)
            if (fwrite(values[i], 1, bytes[i], files[i]) != bytes[i]) return 1;
        if (INPUTS == 0) break;
    }
end:
    for (int i = INPUTS; i < INPUTS + OUTPUTS; i++)
        if (fclose(files[i]) != 0) return 1;
    return 0;
}
