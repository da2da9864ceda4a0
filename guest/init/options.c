/* The aenv.* words of the kernel command line. */
#include "init.h"

#include <string.h>

struct key {
    const char *name;
    char *value;
};

/* A value that does not fit is dropped, not cut: half an address is worse than none. */
static void take(const struct key *keys, size_t count, const char *word, size_t length) {
    for (size_t i = 0; i < count; i++) {
        size_t name = strlen(keys[i].name);
        if (length <= name || strncmp(word, keys[i].name, name) != 0 || word[name] != '=')
            continue;
        size_t size = length - name - 1;
        if (size >= VALUE_MAX) {
            log_line("%s is too long, ignored", keys[i].name);
            return;
        }
        memcpy(keys[i].value, word + name + 1, size);
        keys[i].value[size] = 0;
        return;
    }
}

void options_parse(struct options *options, const char *cmdline) {
    const struct key keys[] = {
        {"aenv.ip4", options->ip4},           {"aenv.gw4", options->gw4},     {"aenv.ip6", options->ip6},
        {"aenv.gw6", options->gw6},           {"aenv.gwmac", options->gwmac}, {"aenv.dns", options->dns},
        {"aenv.hostname", options->hostname}, {"aenv.init", options->init},   {"aenv.rootflags", options->rootflags},
    };
    memset(options, 0, sizeof *options);
    for (const char *word = cmdline; *word;) {
        size_t length = strcspn(word, " \n");
        take(keys, sizeof keys / sizeof *keys, word, length);
        word += length;
        word += strspn(word, " \n");
    }
}

void options_read(struct options *options) {
    char cmdline[4096];
    if (file_read("/proc/cmdline", cmdline, sizeof cmdline) < 0)
        fatal_errno("/proc/cmdline");
    options_parse(options, cmdline);
}
