/* lo and eth0. The addresses come from the kernel command line and never change: they are part of every snapshot. */
#include "init.h"
#include "netlink.h"

#include <arpa/inet.h>
#include <errno.h>
#include <linux/neighbour.h>
#include <linux/if_addr.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char DEVICE[] = "eth0";

struct address {
    int family;
    size_t size;
    unsigned char bytes[16];
    unsigned prefix;
};

/* "ADDRESS" or "ADDRESS/PREFIX" of the family. Returns false when it is not one. */
static bool parse_address(int family, const char *text, struct address *out) {
    char copy[VALUE_MAX];
    snprintf(copy, sizeof copy, "%s", text);
    out->family = family;
    out->size = family == AF_INET ? 4 : 16;
    out->prefix = out->size * 8;
    char *slash = strchr(copy, '/');
    if (slash) {
        char *end;
        *slash = 0;
        unsigned long prefix = strtoul(slash + 1, &end, 10);
        if (end == slash + 1 || *end || prefix > out->prefix)
            return false;
        out->prefix = prefix;
    }
    return inet_pton(family, copy, out->bytes) == 1;
}

static bool parse_mac(const char *text, unsigned char mac[6]) {
    int end = 0;
    return sscanf(text, "%2hhx:%2hhx:%2hhx:%2hhx:%2hhx:%2hhx%n", &mac[0], &mac[1], &mac[2], &mac[3], &mac[4], &mac[5],
                  &end) == 6 && text[end] == 0;
}

static void link_up(int netlink, int index, const char *name) {
    struct ifinfomsg head = {.ifi_index = index, .ifi_flags = IFF_UP, .ifi_change = IFF_UP};
    struct request request;
    netlink_begin(&request, RTM_NEWLINK, 0, &head, sizeof head);
    if (netlink_talk(netlink, &request) != 0)
        log_errno("%s up", name);
}

static int add_address(int netlink, int index, const struct address *address) {
    /* NODAD: duplicate address detection would keep the address unusable for a second, and asks a link where there
     * is nobody else. */
    struct ifaddrmsg head = {
        .ifa_family = address->family, .ifa_prefixlen = address->prefix, .ifa_index = index,
        .ifa_flags = address->family == AF_INET6 ? IFA_F_NODAD : 0,
    };
    struct request request;
    netlink_begin(&request, RTM_NEWADDR, NLM_F_CREATE | NLM_F_REPLACE, &head, sizeof head);
    netlink_attribute(&request, IFA_LOCAL, address->bytes, address->size);
    netlink_attribute(&request, IFA_ADDRESS, address->bytes, address->size);
    return netlink_talk(netlink, &request);
}

static int add_default_route(int netlink, int index, const struct address *gateway) {
    struct rtmsg head = {
        .rtm_family = gateway->family, .rtm_table = RT_TABLE_MAIN, .rtm_protocol = RTPROT_BOOT,
        .rtm_scope = RT_SCOPE_UNIVERSE, .rtm_type = RTN_UNICAST,
    };
    struct request request;
    netlink_begin(&request, RTM_NEWROUTE, NLM_F_CREATE | NLM_F_REPLACE, &head, sizeof head);
    netlink_attribute(&request, RTA_GATEWAY, gateway->bytes, gateway->size);
    netlink_attribute(&request, RTA_OIF, &index, sizeof index);
    return netlink_talk(netlink, &request);
}

/* A permanent entry: the first packet after a restore goes out at once, with no ARP or neighbour discovery, and
 * whatever answered in the previous life of this guest is never asked for. */
static int add_neighbour(int netlink, int index, const struct address *gateway, const unsigned char mac[6]) {
    struct ndmsg head = {.ndm_family = gateway->family, .ndm_ifindex = index, .ndm_state = NUD_PERMANENT};
    struct request request;
    netlink_begin(&request, RTM_NEWNEIGH, NLM_F_CREATE | NLM_F_REPLACE, &head, sizeof head);
    netlink_attribute(&request, NDA_DST, gateway->bytes, gateway->size);
    netlink_attribute(&request, NDA_LLADDR, mac, 6);
    return netlink_talk(netlink, &request);
}

static void family_up(int netlink, int index, int family, const char *own, const char *gw, const char *gwmac) {
    struct address address, gateway;
    unsigned char mac[6];
    if (!*own)
        return;
    if (!parse_address(family, own, &address)) {
        log_line("not an address: %s", own);
        return;
    }
    if (add_address(netlink, index, &address) != 0) {
        log_errno("address %s", own);
        return;
    }
    if (!*gw)
        return;
    if (!parse_address(family, gw, &gateway) || strchr(gw, '/')) {
        log_line("not a gateway address: %s", gw);
        return;
    }
    if (*gwmac && !parse_mac(gwmac, mac))
        log_line("not a MAC address: %s", gwmac);
    else if (*gwmac && add_neighbour(netlink, index, &gateway, mac) != 0)
        log_errno("neighbour %s", gw);
    if (add_default_route(netlink, index, &gateway) != 0)
        log_errno("route by %s", gw);
}

/* No router answers on this link and nobody else is on it, so everything that would ask is noise: it costs wake-ups
 * and dirties memory in every idle guest. Must be set before the link goes up. Absent where IPv6 is off. */
static void quiet_ipv6(void) {
    static const char *const settings[][2] = {
        {"accept_ra", "0"}, {"router_solicitations", "0"}, {"accept_dad", "0"}, {"addr_gen_mode", "1"},
    };
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
        char path[128];
        snprintf(path, sizeof path, "/proc/sys/net/ipv6/conf/%s/%s", DEVICE, settings[i][0]);
        if (file_write(path, settings[i][1], 0, false) != 0 && errno != ENOENT)
            log_errno("%s", path);
    }
}

void network_up(const struct options *options) {
    int netlink = netlink_open();
    if (netlink < 0) {
        log_errno("netlink");
        return;
    }
    link_up(netlink, 1, "lo"); /* the loopback device is made first in every namespace: its index is 1 */
    int index = (int)if_nametoindex(DEVICE);
    if (index > 0) {
        quiet_ipv6();
        link_up(netlink, index, DEVICE);
        family_up(netlink, index, AF_INET, options->ip4, options->gw4, options->gwmac);
        family_up(netlink, index, AF_INET6, options->ip6, options->gw6, options->gwmac);
    } else if (*options->ip4 || *options->ip6) {
        log_line("there is no %s, so no network", DEVICE);
    }
    close(netlink);
}
