/* Whole connections: the input is a script of what up to four clients send and of what happens around them.
 *
 * Bytes are sent as they are. 0xFF and a letter is a command; what was gathered before it is sent first, as one piece:
 *   0-3 go on as that client        . just cut here                e half-close        k close
 *   w do not read answers  r read   o O the process writes little or much     x X it ends well or by a signal
 *   c it closes its pipes  i it reads its input  t time-outs pass  p P the dialled port answers or closes
 */
#include "fuzz.h"
#include "world.h"

enum { COMMAND = 0xFF, LITTLE = 100, MUCH = 60000, KILLED = 9 };

static void obey(struct world *world, char command, unsigned *client)
{
	switch (command) {
	case '0': case '1': case '2': case '3':
		*client = (unsigned)(command - '0');
		break;
	case 'e': world_half_close(world, *client); break;
	case 'k': world_close(world, *client); break;
	case 'w': world_set_reading(world, *client, false); break;
	case 'r': world_set_reading(world, *client, true); break;
	case 'o': world_process_write(world, false, LITTLE); break;
	case 'O': world_process_write(world, true, MUCH); break;
	case 'x': world_process_end(world, 0); break;
	case 'X': world_process_end(world, KILLED); break;
	case 'c': world_process_close(world); break;
	case 'i': world_process_read(world); break;
	case 't': world_hurry(world); break;
	case 'p': world_port_write(world, "answer", 6); break;
	case 'P': world_port_close(world); break;
	default: break; /* a cut */
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct input input = {data, size};
	struct world *world = world_new();
	unsigned client = 0;

	while (input.left > 0) {
		const uint8_t *next = memchr(input.at, COMMAND, input.left);
		size_t length = next ? (size_t)(next - input.at) : input.left;
		char *piece = take_piece(&input, &length);

		if (length > 0)
			world_send(world, client, piece, length);
		free(piece);
		take_byte(&input); /* the mark */
		obey(world, (char)take_byte(&input), &client);
	}
	world_free(world);
	return 0;
}
