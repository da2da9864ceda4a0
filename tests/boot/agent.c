/* A stand-in for envd: GET /health answers 204, POST /sh runs the body as a command and answers with its output,
 * GET /die ends this process with status 3. One request a connection, headers and body in one packet train. */
#define _GNU_SOURCE
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static void answer(int client, const char *status, const char *body, size_t size) {
    dprintf(client, "HTTP/1.1 %s\r\nContent-Length: %zu\r\nConnection: close\r\n\r\n", status, size);
    for (size_t sent = 0; sent < size;) {
        ssize_t put = write(client, body + sent, size - sent);
        if (put <= 0)
            return;
        sent += (size_t)put;
    }
}

static void run(int client, const char *command) {
    static char output[1 << 20];
    FILE *pipe = popen(command, "r");
    size_t size = pipe ? fread(output, 1, sizeof output, pipe) : 0;
    if (pipe)
        pclose(pipe);
    answer(client, "200 OK", output, size);
}

static void serve(int client) {
    static char request[1 << 16];
    size_t used = 0, wanted = sizeof request - 1;
    char *body = NULL;
    while (used < wanted) {
        ssize_t got = read(client, request + used, sizeof request - 1 - used);
        if (got <= 0)
            break;
        used += (size_t)got;
        request[used] = 0;
        if (!body && (body = strstr(request, "\r\n\r\n"))) {
            char *length = strcasestr(request, "content-length:");
            body += 4;
            wanted = (size_t)(body - request) + (length ? strtoul(length + 15, NULL, 10) : 0);
        }
    }
    if (!strncmp(request, "GET /die ", 9))
        exit(3);
    if (!strncmp(request, "POST /sh ", 9) && body)
        run(client, body);
    else
        answer(client, strncmp(request, "GET /health ", 12) ? "404 Not Found" : "204 No Content", "", 0);
}

int main(void) {
    struct sockaddr_in6 at = {.sin6_family = AF_INET6, .sin6_port = htons(49983)};
    int listener = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(listener, (struct sockaddr *)&at, sizeof at) != 0 || listen(listener, 16) != 0) {
        perror("agent");
        return 1;
    }
    signal(SIGPIPE, SIG_IGN);
    for (;;) {
        int client = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (client >= 0) {
            serve(client);
            close(client);
        }
    }
}
