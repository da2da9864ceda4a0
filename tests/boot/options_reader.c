/* Reads NUL-separated records from standard input. The first byte says what to do with the rest: 'o' parses a kernel
 * command line and prints the values, 'w' looks for the word before the first newline in the text after it. */
#include "../../guest/init/init.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void print_options(const char *line) {
    struct options o;
    options_parse(&o, line);
    printf("%s|%s|%s|%s|%s|%s|%s|%s|%s", o.ip4, o.gw4, o.ip6, o.gw6, o.gwmac, o.dns, o.hostname, o.rootflags, o.init);
}

static void look_for(char *text) {
    char *rest = strchr(text, '\n');
    if (rest)
        *rest++ = 0;
    printf("%d", rest && has_word(rest, text));
}

int main(void) {
    char *record = NULL;
    size_t size = 0;
    while (getdelim(&record, &size, 0, stdin) > 0) {
        /* an exact copy, so that a read past its end is seen by the address sanitizer */
        char *copy = strdup(record);
        if (*copy == 'o')
            print_options(copy + 1);
        else if (*copy == 'w')
            look_for(copy + 1);
        putchar(0);
        free(copy);
    }
    free(record);
    return 0;
}
