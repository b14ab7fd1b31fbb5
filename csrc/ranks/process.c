/* Is another rank's process still there? Numbers of processes are used again, so that
 * one is known by its start as well. */
#define _GNU_SOURCE /* kill() */
#include "vote.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>

/* Of /proc/<pid>/stat: the letter of its state, and when it was started. 0; -1 where
 * there is no such process, 1 where that cannot be read. */
static int
process_read(int64_t pid, char *state, uint64_t *started)
{
    char path[64], line[1024];
    const char *at;
    unsigned long long ticks;
    FILE *file;
    size_t read;
    int field;

    snprintf(path, sizeof(path), "/proc/%lld/stat", (long long)pid);
    file = fopen(path, "r");
    if (file == NULL) {
        return errno == ENOENT ? -1 : 1;
    }
    read = fread(line, 1, sizeof(line) - 1, file);
    fclose(file);
    line[read] = '\0';
    at = strrchr(line, ')'); /* after its name, which may hold anything */
    if (at == NULL || at[1] != ' ' || at[2] == '\0') {
        return read == 0 ? -1 : 1;
    }
    *state = at[2];
    for (field = 3, at += 2; field < 22 && at != NULL; field++) {
        at = strchr(at + 1, ' ');
    }
    if (at == NULL || sscanf(at, "%llu", &ticks) != 1) {
        return 1;
    }
    *started = ticks;
    return 0;
}

uint64_t
oomkit_process_started(int64_t pid)
{
    uint64_t started = 0;
    char state;

    return process_read(pid, &state, &started) == 0 ? started : 0;
}

oomkit_process_state
oomkit_process_look(int64_t pid, uint64_t started)
{
    uint64_t now = 0;
    char state = '?';
    int known = process_read(pid, &state, &now);

    if (known != 0) { /* no /proc, or no such process */
        return kill((pid_t)pid, 0) < 0 && errno == ESRCH ? OOMKIT_PROCESS_DEAD
                                                         : OOMKIT_PROCESS_RUNS;
    }
    if (state == 'Z' || state == 'X' || (started != 0 && now != started)) {
        return OOMKIT_PROCESS_DEAD;
    }
    return state == 'T' || state == 't' ? OOMKIT_PROCESS_STOPPED : OOMKIT_PROCESS_RUNS;
}
