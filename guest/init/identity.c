/* Host name, resolver, hosts and the sysctls of a sandbox. Nothing here is fatal: the image may be read-only or odd. */
#include "init.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const char DEFAULT_NAME[] = "sandbox";
enum { FILE_MAX = 64 * 1024 };

/* A name as sethostname(2) and /etc/hosts can hold it: letters, digits, '-' and '.', at most 64. */
static bool valid_name(const char *name) {
    size_t length = strlen(name);
    return length > 0 && length <= 64 && name[0] != '-' && name[0] != '.' &&
           strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-.") == length;
}

static void pick_name(const struct options *options, char name[VALUE_MAX]) {
    snprintf(name, VALUE_MAX, "%s", options->hostname);
    if (*name && !valid_name(name)) {
        log_line("not a host name: %s", name);
        *name = 0;
    }
    if (!*name && file_read("/etc/hostname", name, VALUE_MAX) > 0)
        name[strcspn(name, " \t\r\n")] = 0;
    if (!valid_name(name))
        snprintf(name, VALUE_MAX, "%s", DEFAULT_NAME);
}

static void set_name(const struct options *options, char name[VALUE_MAX]) {
    pick_name(options, name);
    if (sethostname(name, strlen(name)) != 0)
        log_errno("host name %s", name);
    char line[VALUE_MAX + 2];
    snprintf(line, sizeof line, "%s\n", name);
    if (*options->hostname && file_write("/etc/hostname", line, 0644, false) != 0)
        log_errno("/etc/hostname");
}

/* Give programs the name localhost and the own host name (sudo looks it up), keeping what the image says. */
static void complete_hosts(const char *name) {
    static char hosts[FILE_MAX];
    if (file_read("/etc/hosts", hosts, sizeof hosts) < 0)
        hosts[0] = 0;
    char more[2 * VALUE_MAX] = "";
    size_t used = 0, length = strlen(hosts);
    if (length > 0 && hosts[length - 1] != '\n')
        used += (size_t)snprintf(more + used, sizeof more - used, "\n");
    size_t nothing = used;
    if (!has_word(hosts, "localhost"))
        used += (size_t)snprintf(more + used, sizeof more - used,
                                 "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n");
    if (!has_word(hosts, name))
        used += (size_t)snprintf(more + used, sizeof more - used, "127.0.1.1\t%s\n", name);
    if (used > nothing && file_write("/etc/hosts", more, 0644, true) != 0)
        log_errno("/etc/hosts");
}

/* An image's resolv.conf is kept when it names a server. Docker images have an empty one, systemd images a symbolic
 * link to a file of a service that does not run here. */
static void complete_resolver(const char *servers) {
    static char text[FILE_MAX];
    if (!*servers || (file_read("/etc/resolv.conf", text, sizeof text) >= 0 && has_word(text, "nameserver")))
        return;
    char list[VALUE_MAX], lines[VALUE_MAX * 8] = "", *rest = NULL;
    size_t used = 0;
    snprintf(list, sizeof list, "%s", servers);
    for (char *server = strtok_r(list, ",", &rest); server; server = strtok_r(NULL, ",", &rest)) {
        unsigned char address[16];
        if (inet_pton(AF_INET, server, address) == 1 || inet_pton(AF_INET6, server, address) == 1)
            used += (size_t)snprintf(lines + used, sizeof lines - used, "nameserver %s\n", server);
        else
            log_line("not a name server's address: %s", server);
    }
    if (unlink("/etc/resolv.conf") != 0 && errno != ENOENT)
        log_errno("/etc/resolv.conf");
    if (file_write("/etc/resolv.conf", lines, 0644, false) != 0)
        log_errno("/etc/resolv.conf");
}

static void set_sysctls(void) {
    static const char *const settings[][2] = {
        /* any user may ping and serve on any port: the border of the sandbox is the VM */
        {"net/ipv4/ping_group_range", "0 2147483647"},
        {"net/ipv4/ip_unprivileged_port_start", "0"},
        /* file watchers, editors, browsers and data bases need more than the defaults */
        {"fs/inotify/max_user_watches", "524288"},
        {"fs/inotify/max_user_instances", "1024"},
        {"vm/max_map_count", "262144"},
        /* background compaction moves pages of an idle guest about: each is a dirty page in the next snapshot */
        {"vm/compaction_proactiveness", "0"},
        /* folding counters every second is most of what an idle kernel does */
        {"vm/stat_interval", "30"},
        /* a guest that was paused for a day must not think that its tasks hung */
        {"kernel/hung_task_timeout_secs", "0"},
    };
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
        char path[128];
        snprintf(path, sizeof path, "/proc/sys/%s", settings[i][0]);
        if (file_write(path, settings[i][1], 0, false) != 0 && errno != ENOENT)
            log_errno("%s", path);
    }
}

void identity_apply(const struct options *options) {
    char name[VALUE_MAX];
    set_name(options, name);
    complete_hosts(name);
    complete_resolver(options->dns);
    set_sysctls();
}
