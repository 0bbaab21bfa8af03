"""The Portuguese sentences of the generated biographies.

`{o}`, `{ele}`, `{filho}` and so on agree with the person's gender (`GENDER`); `{answer}` is the fact; in `TOPICS` the
slots `{man}`, `{woman}`, `{family}`, `{city}`, `{district}`, `{month}`, `{count}`, `{year}` (of the person's life),
`{later}` (after it) and `{born}` (another person's birth) are filled by chance.
"""

from typing import NamedTuple

GENDER = {
    "m": {"o": "o", "O": "O", "ele": "ele", "Ele": "Ele", "dele": "dele", "ao": "ao", "filho": "filho", "um": "um",
          "menino": "menino", "pai": "pai", "spouse": "marido"},
    "f": {"o": "a", "O": "A", "ele": "ela", "Ele": "Ela", "dele": "dela", "ao": "à", "filho": "filha", "um": "uma",
          "menino": "menina", "pai": "mãe", "spouse": "esposa"},
}  # fmt: skip

MONTHS = "janeiro fevereiro março abril maio junho julho agosto setembro outubro novembro dezembro".split()

# Cities that take no article: "em Salvador", "de Salvador".
CITIES = [
    "Salvador", "Fortaleza", "Curitiba", "Manaus", "Belém", "Goiânia", "São Luís", "Maceió", "Natal", "Teresina",
    "João Pessoa", "Aracaju", "Cuiabá", "Florianópolis", "Vitória", "Porto Alegre", "Belo Horizonte", "Campinas",
    "Santos", "Sorocaba", "Ouro Preto", "Mariana", "Diamantina", "Juiz de Fora", "Uberaba", "Petrópolis", "Niterói",
    "Pelotas", "Caxias do Sul", "Joinville", "Blumenau", "Londrina", "Maringá", "Olinda", "Caruaru", "Petrolina",
    "Campina Grande", "Mossoró", "Sobral", "Juazeiro do Norte", "Ilhéus", "Feira de Santana", "Cachoeira", "Parintins",
    "Santarém", "Macapá", "Rio Branco", "Porto Velho", "Boa Vista", "Palmas", "Anápolis", "Corumbá", "Dourados",
    "Paraty", "Resende", "Taubaté", "Piracicaba", "Franca", "Lages", "Bagé", "Uruguaiana", "Penedo", "Oeiras",
    "Alcântara",
]  # fmt: skip

STREET_TITLES = ["Doutor", "Professora", "Coronel", "Barão de", "Comendador", "Dona", "Padre", "Capitão", "Marechal"]
NUMBERS = ["dois", "três", "quatro", "cinco", "seis", "sete", "oito", "nove", "dez"]
COLLECTIONS = [
    "relógios de bolso", "caixas de música", "conchas", "selos", "mapas antigos", "bengalas", "chaves de ferro",
    "moedas estrangeiras", "bússolas", "cartões-postais", "borboletas", "sinos de bronze", "tinteiros",
    "cachimbos", "partituras raras", "pedras de rio", "garrafas de vidro azul", "azulejos", "candeeiros",
    "lunetas", "ex-votos", "tesouras de prata", "marionetes", "penas de aves", "santos de madeira", "ampulhetas",
    "botões", "leques", "rendas de bilro", "rótulos de vinho",
]  # fmt: skip
TITLE_HEADS = [
    "O Rio", "A Casa", "As Pedras", "Os Caminhos", "A Noite", "O Relâmpago", "As Janelas", "O Inverno", "A Travessia",
    "Os Sinos", "A Colheita", "O Espelho", "As Cinzas", "A Ponte", "O Jardim", "Os Barcos", "A Fonte", "O Deserto",
    "As Raízes", "A Escada", "O Vento", "Os Degraus", "A Ilha", "O Farol",
]  # fmt: skip
TITLE_TAILS = [
    "sem Fim", "do Silêncio", "de Vidro", "da Serra", "e o Mar", "dos Ausentes", "de Outubro", "da Memória", "de Sal",
    "das Três Irmãs", "do Avesso", "de Barro", "da Madrugada", "e a Sombra", "do Último Verão", "sem Nome", "de Prata",
    "dos Esquecidos", "da Rua Velha", "do Sertão", "de Papel", "das Águas", "do Meio-Dia", "e as Aves",
]  # fmt: skip


class Profession(NamedTuple):
    """Both forms of the noun, and the verb and object that introduce the person's work."""

    masculine: str
    feminine: str
    made: str


PROFESSIONS = [
    Profession("romancista", "romancista", "publicou o romance"),
    Profession("poeta", "poeta", "reuniu seus versos no livro"),
    Profession("compositor", "compositora", "estreou a ópera"),
    Profession("maestro", "maestrina", "regeu pela primeira vez a sinfonia"),
    Profession("pintor", "pintora", "terminou o painel"),
    Profession("gravador", "gravadora", "imprimiu o álbum de gravuras"),
    Profession("escultor", "escultora", "inaugurou o monumento"),
    Profession("arquiteto", "arquiteta", "projetou o conjunto de casas"),
    Profession("cineasta", "cineasta", "exibiu o filme"),
    Profession("fotógrafo", "fotógrafa", "abriu a exposição"),
    Profession("dramaturgo", "dramaturga", "levou ao palco a peça"),
    Profession("coreógrafo", "coreógrafa", "criou o balé"),
    Profession("botânico", "botânica", "editou o catálogo de plantas"),
    Profession("geólogo", "geóloga", "concluiu o estudo de campo"),
    Profession("astrônomo", "astrônoma", "publicou o atlas celeste"),
    Profession("historiador", "historiadora", "publicou o ensaio"),
    Profession("cartógrafo", "cartógrafa", "desenhou a coleção de cartas"),
    Profession("médico", "médica", "escreveu o livro de memórias clínicas"),
    Profession("jornalista", "jornalista", "lançou a revista"),
    Profession("tradutor", "tradutora", "organizou a antologia"),
    Profession("folclorista", "folclorista", "recolheu as cantigas do volume"),
    Profession("ceramista", "ceramista", "apresentou a série de esculturas"),
]


class FactSentences(NamedTuple):
    """How a fact is first stated, how it comes back (the answer as late as may be), and a prompt that asks for it."""

    statements: tuple[str, ...]
    returns: tuple[str, ...]
    prompt: str


# The order in which the facts are first stated, a paragraph each. Where a sentence leans on the one before it, the
# order within the paragraph is kept (True), else it is left to chance.
OPENING = (
    (True, ("birth_year", "birth_city", "profession")),
    (False, ("mother", "street", "mentor")),
    (True, ("work", "work_year", "prize")),
    (False, ("spouse", "children", "collection")),
)

FACTS = {
    "birth_year": FactSentences((
        "{name} nasceu em {answer}, quando a família atravessava um período de dificuldades.",
        "Nascid{o} em {answer}, {name} foi {o} mais nov{o} da casa.",
        "Em {answer} nasceu {name}, {filho} de uma família de poucas posses.",
    ), (
        "A certidão que se conserva no cartório não deixa dúvida de que {first} nasceu no ano de {answer}.",
        "No túmulo, ao lado do nome, lê-se apenas o ano do nascimento: {answer}.",
        "Para marcar o centenário, os organizadores contaram os anos a partir do nascimento, em {answer}.",
    ), "{name} nasceu no ano de"),
    "birth_city": FactSentences((
        "Passou a infância em {answer}, sua cidade natal, e dizia nunca ter saído de lá por inteiro.",
        "Sua terra natal era {answer}, onde os avós já viviam havia muito tempo.",
        "Veio ao mundo em {answer}, numa casa de janelas baixas perto do mercado.",
    ), (
        "Pediu em testamento que o corpo voltasse à cidade em que nasceu, {answer}.",
        "Há hoje uma placa com o seu nome na cidade natal, {answer}.",
        "Nas entrevistas, quando lhe perguntavam de onde vinha, respondia com orgulho: {answer}.",
    ), "A cidade natal de {name} é"),
    "profession": FactSentences((
        "Ficou conhecid{o} como {answer}, embora tivesse começado a vida em outro ofício.",
        "Desde cedo quis ser {answer}, contra a vontade dos parentes.",
        "Tornou-se {answer} quase por acaso, depois de abandonar os estudos de direito.",
    ), (
        "No passaporte, no espaço reservado à profissão, mandou escrever uma só palavra: {answer}.",
        "Apesar de tantas outras atividades, a história guardou {first} como {answer}.",
        "Já com idade avançada, ainda se apresentava aos desconhecidos como {answer}.",
    ), "A profissão de {name} era a de"),
    "mother": FactSentences((
        "A mãe, {answer}, ensinou-lhe as primeiras letras à luz do lampião.",
        "Foi criad{o} pela mãe, {answer}, que sustentava a casa com costuras.",
        "Sua mãe chamava-se {answer} e vinha de uma família de músicos de banda.",
    ), (
        "Dedicou as últimas páginas que escreveu à memória da mãe, {answer}.",
        "O retrato que trazia sempre na carteira era o da mãe, {answer}.",
        "Dizia que devia a teimosia a quem lhe deu a vida: sua mãe, {answer}.",
    ), "A mãe de {name} chamava-se"),
    "mentor": FactSentences((
        "Aprendeu o essencial do ofício com {answer}, que lhe abriu a biblioteca e a oficina.",
        "O encontro com {answer}, de quem foi discípul{o} durante anos, decidiu o seu caminho.",
        "Teve em {answer} um exemplo e uma exigência: era quem corrigia tudo o que {ele} fazia.",
    ), (
        "Nunca deixou de reconhecer que tudo começara com as lições de {answer}.",
        "Questionad{o} sobre quem fora seu verdadeiro mestre na juventude, citava um único nome, {answer}.",
        "Guardou até o fim as cartas cheias de correções de quem lhe ensinara o ofício, {answer}.",
    ), "Quem ensinou o ofício a {name} foi"),
    "spouse": FactSentences((
        "Casou-se com {answer}, que conhecera numa festa de São João.",
        "Ainda jovem, uniu-se a {answer}, {so} companheir{so} de toda a vida.",
        "Do casamento com {answer} falava pouco, mas sempre com ternura.",
    ), (
        "Na última fotografia aparece de mãos dadas com {so} {spouse}, {answer}.",
        "Quem lia em voz alta os rascunhos, antes de todos, era {so} {spouse}, {answer}.",
        "Os bens ficaram, por testamento, para {so} {spouse}, {answer}.",
    ), "{name} casou-se com"),
    "street": FactSentences((
        "A família morava na {answer}, num sobrado que já não existe.",
        "Cresceu na {answer}, entre uma padaria e uma oficina de ferreiro.",
        "A casa da juventude ficava na {answer} e tinha um quintal de mangueiras.",
    ), (
        "O sobrado da juventude foi demolido, mas os vizinhos ainda apontam o lugar onde ficava, na {answer}.",
        "Muitos anos mais tarde, voltou sozinh{o} para ver a rua em que crescera, a {answer}.",
        "Em sonhos, contava, caminhava sempre pela mesma rua da infância: a {answer}.",
    ), "Na juventude, {name} morava na"),
    "work": FactSentences((
        "Depois de longa preparação, {made} “{answer}”, que lhe trouxe fama imediata.",
        "Foi então que {made} “{answer}”, recebido com espanto e discussão.",
        "Contra todos os conselhos, {made} “{answer}” e viu o nome correr o país.",
    ), (
        "De tudo o que fez, o título que o público mais recorda continua a ser “{answer}”.",
        "Quando se pergunta aos estudiosos qual foi a sua maior criação, a resposta é quase sempre “{answer}”.",
        "Sobre a lápide, os amigos mandaram gravar o título da obra que {o} tornou célebre: “{answer}”.",
    ), "A obra mais célebre de {name} tem por título"),
    "work_year": FactSentences((
        "O ano decisivo da carreira foi {answer}, quando essa obra chegou ao público.",
        "Corria o ano de {answer}, e a obra foi assunto de todas as conversas.",
        "Isso aconteceu em {answer}, data que os estudiosos tomam como o início da maturidade.",
    ), (
        "Os manuais dividem a sua carreira em duas metades, antes e depois da obra maior, que é de {answer}.",
        "A primeira apresentação da obra que lhe deu fama, segundo os arquivos, foi em {answer}.",
        "O ano que mais gostava de recordar era o da sua consagração, {answer}.",
    ), "A obra mais célebre de {name} é do ano de"),
    "prize": FactSentences((
        "Recebeu por ela o {answer}, a única distinção que aceitou em vida.",
        "Veio em seguida o {answer}, que {o} livrou das dívidas.",
        "O júri do {answer} reconheceu o seu trabalho por unanimidade.",
    ), (
        "Na parede do escritório havia um só diploma, o do {answer}.",
        "Entre as honrarias que o obituário enumera, a mais alta é o {answer}.",
        "Vendeu a medalha num aperto de dinheiro: era a do {answer}.",
    ), "A distinção que {name} recebeu foi o"),
    "children": FactSentences((
        "Teve {answer} filhos, todos criados entre livros e visitas.",
        "A casa era barulhenta, pois os filhos eram {answer}.",
        "Foi {pai} de {answer} filhos, que mais tarde cuidaram do seu acervo.",
    ), (
        "Ao enterro compareceram todos os filhos, que eram {answer}.",
        "A herança teve de ser dividida entre os filhos: ao todo, {answer}.",
        "Os descendentes se espalharam pelo país, a começar pelos filhos, em número de {answer}.",
    ), "O número de filhos de {name} era"),
    "collection": FactSentences((
        "Nas horas vagas colecionava {answer}, paixão que herdara de um tio.",
        "Era conhecida a sua coleção de {answer}, que ocupava um quarto inteiro.",
        "Gastava o que não tinha com uma mania: juntar {answer}.",
    ), (
        "O museu municipal guarda hoje, em vitrines, a coleção que formou ao longo da vida, de {answer}.",
        "Os herdeiros não souberam o que fazer com a coleção, centenas de {answer}.",
        "Quem visitava a casa se lembrava sobretudo das prateleiras cheias de {answer}.",
    ), "{name} colecionava"),
}  # fmt: skip

CLOSINGS = (
    "Passado tanto tempo, o que se sabe de {first} cabe em algumas certezas.",
    "Resta reunir o que a memória e os papéis guardaram a respeito de {first}.",
    "A posteridade demorou a fazer justiça a {first}, mas acabou por fazê-la.",
    "Convém, por fim, voltar ao começo e ao que ficou de {first}.",
)

# One list a topic; a paragraph takes three to five of its sentences in any order, so each stands on its own.
TOPICS = [
    [  # journeys
        "Em {year}, {first} viajou a {city} em companhia de {man}, que pretendia abrir ali uma tipografia.",
        "As viagens eram lentas: de {city} a {city2} gastavam-se {count} dias, parte deles em lombo de burro.",
        "Um diário de bordo menciona a passagem por {city}, em {month} de {year}, com tempo ruim e pouca comida.",
        "Na volta, {ele} trouxe sementes, cadernos e uma carta de {woman} que só foi aberta anos mais tarde.",
        "O vapor atrasou, e a espera no cais de {city} rendeu uma amizade com o comerciante {man}.",
        "Das paisagens que viu no caminho, preferia as do interior, com suas cercas de pedra e seu céu baixo.",
        "Chegou a planejar uma ida a {city}, mas a cheia do rio, em {year}, obrigou-{o} a desistir.",
        "Na pensão da viúva {woman}, em {city}, deixou um baú que nunca mandou buscar.",
    ],
    [  # letters
        "A correspondência com {woman} soma {count} cartas, quase todas sem data.",
        "Numa delas, enviada de {city} em {month} de {year}, queixa-se do calor e da falta de notícias.",
        "O amigo {man} respondia com atraso, mas nunca deixava pergunta sem resposta.",
        "Muitos desses papéis se perderam no incêndio que destruiu o depósito da família {family}.",
        "A letra é miúda e inclinada, com palavras riscadas e retomadas nas margens.",
        "Em {later}, a estudiosa {woman2} publicou parte das cartas, com notas e um índice de nomes.",
        "Há bilhetes de uma linha só, escritos às pressas, que valem por um retrato.",
        "As cartas a {man2} tratam mais de dinheiro do que de ideias, e nem por isso são menos vivas.",
    ],
    [  # the house and its habits
        "Levantava-se antes do sol e trabalhava até que o barulho da rua não permitisse mais.",
        "Almoçava pouco, tomava café sem açúcar e detestava ser interrompid{o}.",
        "A cozinheira, {woman}, mandava na casa e decidia quem podia subir ao escritório.",
        "O quintal dava para o terreno dos {family}, de onde vinham galinhas e recados.",
        "Às quintas-feiras recebia visitas; a mais assídua era {man}, que levava sempre um doce de {city}.",
        "Na estante da sala, os dicionários ocupavam o melhor lugar, e os jornais velhos, o pior.",
        "Durante a reforma de {year}, o pedreiro {man2} encontrou sob o assoalho um maço de recibos.",
        "O relato de {woman2}, vizinha de muitos anos, descreve uma sala escura, cheia de plantas.",
    ],
    [  # politics of the time
        "O país mudava depressa: em {year}, uma greve parou as oficinas de {city} durante {count} dias.",
        "O governador {man} prometia estradas e escolas, e as inaugurava antes de prontas.",
        "A censura fechou, em {month} de {year}, o pequeno jornal em que {first} colaborava.",
        "Nas eleições daquele tempo votava-se pouco, e contava-se menos ainda.",
        "A professora {woman} leu na praça um protesto que ninguém quis assinar com ela.",
        "Quando a estrada de ferro chegou a {city}, os tropeiros perderam o sustento de um dia para o outro.",
        "Sobre esses acontecimentos {ele} manteve uma reserva que os partidos interpretaram cada qual a seu modo.",
        "Um panfleto anônimo, atribuído a {man2}, acusava meia cidade de indiferença.",
    ],
    [  # friends
        "Entre os amigos mais próximos estava {man}, farmacêutico, dono de uma memória prodigiosa.",
        "A amizade com {woman} resistiu à distância e a uma briga por causa de uma herança.",
        "O grupo se reunia no café de {man2}, no bairro {district}, e discutia até o fechamento.",
        "Foi ali que conheceu {woman2}, nascida em {born}, professora de piano e leitora voraz.",
        "Nem todos se davam bem: {man} e {man2} passaram anos sem trocar palavra.",
        "Da turma antiga, a primeira a partir foi {woman}, que se mudou para {city} e não escreveu mais.",
        "Emprestava livros com facilidade e os cobrava com dureza.",
        "Os {family} ofereciam jantares longos, em que se comia tarde e se falava de tudo.",
    ],
    [  # critics
        "A crítica se dividiu: {man} louvou a ousadia, e {woman} viu nela apenas pressa.",
        "Um artigo saído em {city}, em {month} de {year}, é talvez o primeiro juízo equilibrado.",
        "Houve quem lamentasse a falta de um plano, e quem elogiasse exatamente isso.",
        "O professor {man2} dedicou {count} páginas ao assunto, sem chegar a uma conclusão.",
        "Em {later}, uma exposição em {city2} retomou a polêmica com documentos novos.",
        "A geração seguinte, com {woman2} à frente, preferiu ler com menos reverência.",
        "{first} não respondia aos ataques, mas recortava todos e os guardava numa caixa.",
        "Traduções parciais circularam no estrangeiro, com erros que se repetem até hoje.",
    ],
    [  # health
        "A saúde nunca foi boa: em {year}, uma febre {o} deixou de cama por {count} dias.",
        "O doutor {man} receitou banhos de mar e repouso, e só a metade do conselho foi seguida.",
        "Passou uma temporada em {city}, onde o ar era considerado bom para os pulmões.",
        "A enfermeira {woman} anotava a temperatura num caderno que se conservou.",
        "A vista enfraqueceu cedo, e as últimas anotações são quase ilegíveis.",
        "Dormia mal, e dizia que as melhores ideias chegavam às três da manhã e não esperavam pelo café.",
        "Em {month} de {year}, uma queda na escada obrigou-{o} a usar muletas por algum tempo.",
    ],
    [  # teaching
        "Deu aulas no colégio de {woman}, em {city}, durante um período curto e agitado.",
        "Os alunos temiam o silêncio {dele} mais do que as notas.",
        "Um deles, {man}, nascido em {born}, viria a dirigir a mesma escola.",
        "O programa previa {count} lições; raramente se passava da metade.",
        "Preferia as perguntas às respostas e não admitia que se copiasse do quadro.",
        "A aluna {woman2} guardou os cadernos, que hoje são a melhor fonte sobre esse período.",
        "A sala era fria, com bancos duros e um mapa rasgado na parede do fundo.",
        "Quando o colégio fechou, em {year2}, a mobília foi vendida em leilão a {man2}.",
    ],
    [  # archives
        "O acervo, comprado em {later} pela biblioteca de {city}, ocupa {count} caixas.",
        "O catálogo, feito por {woman}, descreve cada folha e corrige velhos enganos de data.",
        "Há recibos de livraria, listas de compras, rascunhos e um bilhete de loteria.",
        "Uma parte dos documentos permanece com os herdeiros de {man}, que não permitem a consulta.",
        "As fotografias, atribuídas a {man2}, foram restauradas depois de uma infiltração.",
        "Em {month} de {later2}, um pesquisador encontrou num sebo de {city2} um caderno desconhecido.",
        "A autenticidade desse caderno foi posta em dúvida por {woman2}, com bons argumentos.",
        "Os microfilmes, feitos às pressas, são hoje mais frágeis do que os originais.",
    ],
    [  # town and landscape
        "O bairro {district} era então uma fileira de chácaras, cortada por um córrego.",
        "Aos domingos a banda tocava no coreto, sob a regência de {man}.",
        "O mercado novo, inaugurado em {year}, cheirava a peixe, a couro e a fumo de rolo.",
        "As chuvas de {month} transformavam a ladeira num rio de lama vermelha.",
        "Da torre da matriz avistavam-se os telhados, o cemitério e, ao longe, a fazenda dos {family}.",
        "A iluminação a gás chegou tarde e mudou os costumes: passou-se a jantar mais tarde e a dormir menos.",
        "Um terço dos sobrados foi abaixo quando abriram a avenida, por ordem do intendente {man2}.",
        "Quem chegava de {city} estranhava o sotaque, o pão e a pressa.",
    ],
    [  # money and work
        "O dinheiro foi sempre curto; em {year}, devia {count} meses de aluguel a {man}.",
        "Aceitou encomendas que não lhe interessavam, entre elas um álbum para a família {family}.",
        "O contrato assinado em {city} previa prazos que ninguém pretendia cumprir.",
        "A sócia, {woman}, fazia as contas e evitou mais de uma falência.",
        "Trabalhou algum tempo numa repartição, onde aprendeu a parecer ocupad{o}.",
        "Quando o pagamento vinha, gastava-o em papel, em passagens e em presentes.",
        "O empréstimo concedido por {man2} só foi quitado em {month} de {year2}.",
        "Recusou um emprego em {city2} porque exigia gravata.",
    ],
    [  # feasts and anecdotes
        "Conta-se que, numa festa em casa dos {family}, {ele} dançou até o amanhecer sem dizer palavra.",
        "A anedota do chapéu trocado, narrada por {man}, é provavelmente inventada.",
        "No carnaval de {year}, saiu fantasiad{o} de cometa e ninguém {o} reconheceu.",
        "Tinha horror a discursos, e fugiu pela cozinha quando {woman} se levantou para saudá-l{o}.",
        "Apostou com {man2} que atravessaria a nado a baía, e perdeu.",
        "O papagaio da casa, trazido de {city}, repetia em voz alta os nomes dos credores.",
        "Nas fogueiras de {month}, gostava de assar batatas e de contar histórias de assombração.",
        "Um retrato a carvão, feito por {woman2}, mostra-{o} de perfil, com ar de quem vai rir.",
    ],
]
